"""Make or load a model, train it on pairs of texts and ask it in texts, in a few lines (docs/notebook.md)."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from lm import convert, sharding
from lm.config.base import SettingError, check_at_least
from lm.config.mesh import MeshConfig
from lm.config.model import ModelConfig, Pool
from lm.config.training import OptimizerConfig
from lm.data.batches import Batches, stream
from lm.data.classification import Reader
from lm.data.packing import pad_texts
from lm.data.seq2seq import Example, MixtureRows
from lm.evaluate.generate import Model
from lm.evaluate.loglikelihood import Masking, ShardBatch
from lm.evaluate.text_model import TextModel
from lm.nn.transformer import Transformer
from lm.objectives.denoising import Lengths
from lm.predictions import TEXTS, TextHead
from lm.special_tokens import boundary_tokens, check_special, prompt_special_ids, special_ids
from lm.tokenizers.huggingface import exported_boundary_ids, load_pretrained_tokenizer
from lm.tokenizers.tokenizer import BoundaryTokens, Tokenizer
from lm.train.checks import check_mesh
from lm.train.flops import longest_row
from lm.train.step import StepSpec, build

PAIRS = "pairs"  # the name of the one task


@dataclass(frozen=True)
class PairTraining:
    """Settings of training on pairs of texts."""

    steps: int = 100  # updates [steps]
    # rows, into each of which as many pairs go as fit; a multiple of the number of devices [sequences]
    batch_size: int = 8
    inputs_length: int = 64  # longer inputs lose their end, EOS counted [tokens]
    targets_length: int = 32  # the same of targets [tokens]
    optimizer: OptimizerConfig = OptimizerConfig(name="adamw", schedule="constant", learning_rate=0.001)
    seed: int = 0  # of the order of pairs, and of dropout

    def __post_init__(self):
        check_at_least(self, "", steps=1, batch_size=1, inputs_length=2, targets_length=2)


@dataclass(frozen=True)
class TrainableModel(TextModel):
    """A model that is asked in texts, with its tokenizer, so that it can be trained on more of them."""

    tokenizer: Tokenizer = field(kw_only=True)
    # how ``embed`` pools the states of a text; None: the last for decoders, the first for encoders
    pool: Pool | None = field(default=None, kw_only=True)
    head: TextHead | None = field(default=None, kw_only=True)  # the fine-tuned head, if there is one

    def predict(self, texts: Sequence[Any]) -> list[Any]:
        """Return what the fine-tuned head says of each text; SettingError for a model without one.

        What a text is, and what is said of it, ``lm.predictions.TextHead.predict`` lists by kind of head.
        """
        return self._text_head.predict(texts)

    def embed(self, texts: Sequence[Any]) -> np.ndarray:
        """Return a vector for each text or pair of texts, float32 [N,D], pooled as a head reads it."""
        return self._text_head.embed(texts)

    @property
    def _text_head(self) -> TextHead:
        if self.head is not None:
            return self.head
        model = cast(Transformer, self.model)
        config = model.config
        reader = Reader(TEXTS, self.tokenizer, config.architecture, self._row_length)
        pool = self.pool or ("last" if config.has_decoder else "first")
        return TextHead(model, reader, pool, cast(Any, self.shard_batch))


def make_model(config: ModelConfig, tokenizer: Tokenizer, seed: int) -> TrainableModel:
    """Return a new model with random parameters.

    Raises SettingError if the tokenizer is larger than the model's embedding.
    """
    if tokenizer.vocab_size > config.vocab_size:
        raise SettingError(
            f"vocab_size={config.vocab_size} is less than the vocabulary's {tokenizer.vocab_size}"
        )
    return text_model(Transformer(config, nnx.Rngs(params=jax.random.key(seed))), tokenizer)


def load_model(folder: str | Path) -> TrainableModel:
    """Load a published checkpoint with its tokenizer: config.json, safetensors and tokenizer files.

    A folder of sentence-transformers says how ``embed`` pools the states of a text.
    """
    config, model = convert.load(folder)
    boundary_ids = None
    if not config.has_encoder:
        boundary_ids = exported_boundary_ids(Path(folder))
    if boundary_ids is not None:  # of the settings of a decoder, config.json lacks its start token
        model.config = replace(config, special=replace(config.special, start=boundary_ids[0]))
    tokenizer = load_pretrained_tokenizer(Path(folder), config.vocab_size)
    texts = text_model(model, tokenizer, framed=boundary_ids)
    return replace(texts, pool=convert.pooling_of(Path(folder)))


def train_model(
    texts: TrainableModel, pairs: Sequence[tuple[str, str]], training: PairTraining
) -> tuple[TrainableModel, list[float]]:
    """Return the model trained on (input, answer) pairs, and the loss of each step [nats a token].

    The loss of a decoder without an encoder is the mean over prompt and answer. ``texts`` itself stays as it
    is. A decoder then reads a prompt as in training: start token, prompt, EOS.

    Raises SettingError without a pair or for one that is not two texts, for pairs that are longer than the
    model's positions reach, for a batch that the devices cannot share evenly, for a model that writes no
    text, and for one whose texts end otherwise than its tokenizer's.
    """
    if not pairs:
        raise SettingError("pairs=() should have at least one (input, answer) pair")
    if not texts.model.config.has_decoder:
        raise SettingError("an encoder writes no answers: train a model with a decoder")
    tokenizer, seed = texts.tokenizer, training.seed
    config = replace(texts.model.config, special=special_ids(texts.model.config, tokenizer))
    check_special(config, tokenizer, "the vocabulary")
    mesh = sharding.make_mesh(MeshConfig())
    check_mesh(config, mesh.shape, training.batch_size)
    examples: list[Example] = []
    for number, pair in enumerate(pairs):
        is_pair = isinstance(pair, tuple | list) and len(pair) == 2
        if not is_pair or not all(isinstance(text, str) for text in pair):
            raise SettingError(f"pairs[{number}]={pair!r:.80} should be (input, answer), two texts")
        inputs, answer = pair
        examples.append((texts.encode(inputs), texts.encode(answer)))
    lengths = Lengths(training.inputs_length, training.inputs_length, training.targets_length)
    boundary = boundary_tokens(config, tokenizer)
    _check_positions(config, examples, lengths, boundary)
    rows = MixtureRows(
        {PAIRS: examples},
        rates={PAIRS: 1.0},
        architecture=config.architecture,
        lengths=lengths,
        seed=seed,
        boundary=boundary,
        pad_to_multiple_of=config.funnel.multiple,
    )
    steps = build(StepSpec(config, training.optimizer.ending_at(training.steps)), mesh)
    state = steps.initial_state(seed)
    trained_before = sharding.named(texts.model)
    params = {}
    for name, initial in state.params.items():
        copied = jnp.array(trained_before[name])  # since a step consumes the state before it
        params[name] = jax.device_put(copied, initial.sharding)
    average = None if state.average is None else jax.tree.map(jnp.copy, params)
    state = replace(state, params=params, average=average)
    step = steps.seeded_train_step(seed)
    losses = []
    for batch in stream(Batches(rows, training.batch_size), 0, training.steps):
        state, metrics = step(state, sharding.put_batch(batch, mesh))
        losses.append(metrics["loss"])
    trained = text_model(
        cast(Transformer, state.eval_model), tokenizer, steps.shard_batch, max_length=texts.max_length
    )
    if not config.has_encoder:  # whatever a published tokenizer puts around a text
        begin, end = config.special.start, config.special.eos

        def encode_prompt(text: str) -> list[int]:
            return Tokenizer.encode_with_special_tokens(tokenizer, text, begin, end)

        trained = replace(trained, encode_prompt=encode_prompt)
    return replace(trained, pool=texts.pool), [float(loss) for loss in losses]


def _check_positions(
    config: ModelConfig, examples: Sequence[Example], lengths: Lengths, boundary: BoundaryTokens
) -> None:
    """Raise SettingError if a pair, cut to ``lengths``, has more tokens than the model has positions.

    Pairs that are packed into one row count their positions each from 0.
    """
    limit = longest_row(config)
    if limit is None:
        return
    inputs = pad_texts([inputs for inputs, _ in examples], lengths.inputs, boundary).lengths
    targets = pad_texts([answer for _, answer in examples], lengths.targets, boundary).lengths
    sizes = np.maximum(inputs, targets) if config.has_encoder else inputs + targets
    if (longest := int(sizes.max())) > limit:
        raise SettingError(
            f"a pair of {longest} tokens exceeds model.positions.max_length={limit}: make inputs_length="
            f"{lengths.inputs} or targets_length={lengths.targets} smaller, which cuts pairs, or shorten it"
        )


def text_model(
    model: Model,
    tokenizer: Tokenizer,
    shard_batch: ShardBatch = jax.device_put,
    framed: tuple[int | None, int | None] | None = None,
    max_length: int | None = None,
) -> TrainableModel:
    """Return a model with its tokenizer, to be asked in texts.

    ``framed`` are the ids around a prompt, by default ``prompt_special_ids``'s.
    """
    config = model.config
    begin, end = framed or prompt_special_ids(config, tokenizer)
    masking: Masking | None = None
    prefix = tokenizer.eos if begin is None else begin
    if not config.has_decoder:
        before = () if begin is None else (begin,)
        after = () if end is None else (end,)
        masking = Masking(tokenizer.mask, before, after)
        prefix = None
    # a mask is left out of answers, unless it is the first of the sentinels that stand for spans
    is_sentinel = config.has_encoder and tokenizer.mask == tokenizer.sentinel(0)
    skipped = None if is_sentinel else tokenizer.mask

    def encode_prompt(text: str) -> list[int]:
        return tokenizer.encode_with_special_tokens(text, begin, end)

    def decode(ids: Iterable[int]) -> str:
        return tokenizer.decode(token for token in ids if token != skipped)

    return TrainableModel(
        model=model,
        shard_batch=shard_batch,
        encode=tokenizer.encode,
        encode_prompt=encode_prompt,
        decode=decode,
        prefix=prefix,
        masking=masking,
        max_length=max_length,
        tokenizer=tokenizer,
    )
