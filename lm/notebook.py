"""A model in a few lines: made or loaded, trained on pairs of texts, asked in texts (docs/notebook.md)."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import jax
import jax.numpy as jnp
from flax import nnx

from lm import convert, sharding
from lm.data.batches import Batches, stream
from lm.data.objectives import Lengths
from lm.data.supervised import Mixed
from lm.data.text.published import find_tokenizer
from lm.data.text.vocabulary import EOS, PAD, Vocabulary
from lm.evaluate.decode import Model
from lm.evaluate.likelihood import Masking, Put
from lm.evaluate.texts import TextModel
from lm.mesh import MeshConfig
from lm.nn.config import ModelConfig
from lm.nn.transformer import Transformer
from lm.settings import SettingError, at_least
from lm.train.config import OptimizerConfig
from lm.train.step import StepSpec, build

PAIRS = "pairs"  # the name of the one task


@dataclass(frozen=True)
class PairTraining:
    """How a model is trained on pairs of texts."""

    steps: int = 100  # updates [steps]
    batch_size: int = 8  # rows, into each of which as many pairs go as fit [sequences]
    inputs_length: int = 64  # longer inputs lose their end, EOS counted [tokens]
    targets_length: int = 32  # the same of targets [tokens]
    optimizer: OptimizerConfig = OptimizerConfig(name="adamw", schedule="constant", learning_rate=0.001)
    seed: int = 0  # of the order of pairs, and of dropout

    def __post_init__(self):
        at_least(self, "", steps=1, batch_size=1, inputs_length=2, targets_length=2)


def make_model(config: ModelConfig, vocabulary: Vocabulary, seed: int) -> TextModel:
    """A new model, with random parameters; SettingError if the vocabulary is larger than its embedding."""
    if vocabulary.size > config.vocab_size:
        raise SettingError(f"vocab_size={config.vocab_size} is less than the vocabulary's {vocabulary.size}")
    return text_model(Transformer(config, nnx.Rngs(params=jax.random.key(seed))), vocabulary)


def load_model(folder: str | Path) -> TextModel:
    """A published checkpoint with its tokenizer: config.json, safetensors and tokenizer files."""
    config, model = convert.load(folder)
    return text_model(model, find_tokenizer(Path(folder), config.vocab_size))


def train_model(
    texts: TextModel, pairs: Sequence[tuple[str, str]], training: PairTraining
) -> tuple[TextModel, list[float]]:
    """The model after training on (input, answer) pairs, and the loss of each step [nats a token].

    ``texts`` itself stays as it is. SettingError for a model whose texts are padded and ended by other ids
    than those of ``lm.data.packing``, and for one that writes no text.
    """
    config, seed = texts.model.config, training.seed
    if (config.special.pad, config.special.eos) != (PAD, EOS):
        raise SettingError(f"model.special={config.special} should have pad {PAD} and eos {EOS}")
    examples = [(texts.encode(inputs), texts.encode(answer)) for inputs, answer in pairs]
    lengths = Lengths(training.inputs_length, training.inputs_length, training.targets_length)
    rows = Mixed({PAIRS: examples}, {PAIRS: 1.0}, config.architecture, lengths, seed)
    mesh = sharding.make_mesh(MeshConfig())
    steps = build(StepSpec(config, training.optimizer), mesh)
    state = steps.init(seed)
    learnt = sharding.named(texts.model)  # copied, since a step consumes the state before
    params = {
        name: jax.device_put(jnp.array(learnt[name]), like.sharding) for name, like in state.params.items()
    }
    state, step, losses = replace(state, params=params), steps.train_step(seed), []
    for batch in stream(Batches(rows, training.batch_size), 0, training.steps):
        state, metrics = step(state, sharding.put_batch(batch, mesh))
        losses.append(metrics["loss"])
    return replace(texts, model=cast(Transformer, state.model), put=steps.put), [
        float(loss) for loss in losses
    ]


def text_model(
    model: Model,
    vocabulary: Vocabulary,
    put: Put = jax.device_put,
    framed: tuple[int | None, int | None] | None = None,
    max_length: int | None = None,
) -> TextModel:
    """A model and its vocabulary; ``framed``: the ids around a prompt, by default as ``framing`` says."""
    config, (begin, end) = model.config, framed or framing(model.config, vocabulary)
    masking = None
    if not config.has_decoder:
        ends = ((() if token is None else (token,)) for token in (begin, end))
        masking = Masking(vocabulary.mask, *ends)
    prefix = None if masking else vocabulary.eos if begin is None else begin
    return TextModel(
        model,
        put,
        vocabulary.encode,
        lambda text: vocabulary.encode_framed(text, begin, end),
        lambda ids: vocabulary.decode(token for token in ids if token != vocabulary.mask),
        prefix,
        masking,
        max_length,
    )


def framing(config: ModelConfig, vocabulary: Vocabulary) -> tuple[int | None, int | None]:
    """The ids that begin and end a text that the model shall answer."""
    if config.architecture == "encoder":
        return vocabulary.cls, vocabulary.sep
    if config.has_encoder:
        return None, vocabulary.eos
    start = config.special.start
    return (vocabulary.cls, None) if start is None else (start, vocabulary.eos)
