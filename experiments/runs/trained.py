"""Opens the model of a trained or imported run, and encodes texts as that model reads them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np

from experiments.runs.kinds.answers import reader_of
from experiments.runs.kinds.counts import Ngrams
from experiments.runs.kinds.head import HeadFinetuning, pooling
from experiments.runs.kinds.network import NetworkStage
from experiments.runs.kinds.stage import Stage
from experiments.runs.paths import cache_compiled, describe_model, find_cache, load_settings, model_of_run
from experiments.runs.stages import stages_of
from experiments.runs.vocabulary import stored_vocabulary
from lm import sharding
from lm.batch import Batch
from lm.classical.ngram import KneserNey
from lm.classical.word2vec import WordVectors
from lm.config.base import SettingError, did_you_mean
from lm.config.model import ModelConfig
from lm.evaluate.generate import prompt_batch
from lm.evaluate.loglikelihood import without_start
from lm.nn.transformer import Transformer
from lm.notebook import TrainableModel, text_model
from lm.predictions import TextHead
from lm.special_tokens import boundary_tokens, is_trained_here
from lm.tokenizers.tokenizer import MASK, Tokenizer
from lm.train.optimizers import EMBEDDING

T = TypeVar("T")
# values of objective.inputs that put no mark where tokens are hidden
UNMARKED_INPUTS = {"drop", "shuffle"}


def pretrains_on_corpus(stage: Stage) -> bool:
    """Return whether a stage is pre-training on text alone, without examples of tasks."""
    return stage.is_pretraining and stage.settings.mixing.pretraining == "corpus"


def knows_eos(stage: Stage) -> bool:
    """Return whether the model of a stage was trained on texts with EOS, which examples of tasks have."""
    return not pretrains_on_corpus(stage) or stage.settings.objective.writes_eos


def boundary_ids(stage: Stage, vocabulary: Tokenizer) -> tuple[int | None, int | None]:
    """Return the ids that begin and end a text as the model of a stage reads it.

    None: the text begins, or ends, without a special token.
    """
    experiment, model = stage.settings, stage.settings.model
    if not model.has_decoder:
        return vocabulary.cls, vocabulary.sep
    eos = vocabulary.eos if knows_eos(stage) else None
    if model.has_encoder:
        return None, eos
    if model.special.start is None and not is_trained_here(vocabulary):
        return vocabulary.cls, None
    # EOS ends the inputs of an example; a language model has no inputs
    has_inputs = not pretrains_on_corpus(stage) or experiment.objective.has_inputs
    return boundary_tokens(model, vocabulary).decoder_start, eos if has_inputs else None


@dataclass(frozen=True)
class Trained:
    """Holds the trained model of one stage of a run."""

    stage: NetworkStage
    vocabulary: Tokenizer
    model: Transformer
    shard_batch: Callable[[Any], Any]  # places a batch on the devices
    devices: int  # the number of rows of a batch is a multiple of it
    description: str = ""  # names the run and the stage, and the other models of the run

    @property
    def config(self) -> ModelConfig:
        return self.stage.settings.model

    def encode(self, text: str) -> list[int]:
        """Return the ids of ``text`` as an encoder reads it, or as a decoder's prompt.

        The name of the mask in the text, such as [MASK], becomes the mask. A fine-tuned decoder reads a
        prompt as in its fine-tuning, whatever its tokenizer puts around a text.
        """
        begin, end = boundary_ids(self.stage, self.vocabulary)
        if self.stage.writes_answers and not self.config.has_encoder:
            return Tokenizer.encode_with_special_tokens(self.vocabulary, text, begin, end)
        return self.vocabulary.encode_with_special_tokens(text, begin, end)

    def encode_data(self, text: str) -> list[int]:
        """Return the ids of a task's inputs, with special tokens around them as by ``encode``.

        The name of a mask in the text stays text.
        """
        ids = self.vocabulary.encode(text)
        begin, end = boundary_ids(self.stage, self.vocabulary)
        if self.stage.writes_answers and not self.config.has_encoder:
            return Tokenizer.add_special_tokens(self.vocabulary, ids, begin, end)
        return self.vocabulary.add_special_tokens(ids, begin, end)

    def encode_gaps(self, text: str) -> tuple[list[int], list[int]]:
        """Return the ids of a text with [MASK] for gaps, and the ids of the sentinels that replace the masks.

        There are no sentinels if the model reads [MASK] itself.
        """
        vocabulary, count = self.vocabulary, text.count(MASK)
        denoisers = self.stage.settings.objective.denoisers
        reads_sentinels = any(denoiser.objective.inputs == "sentinels" for denoiser in denoisers)
        if self.config.published:  # its settings do not say by which objective it was trained
            reads_sentinels = vocabulary.num_sentinels > 0
        if not self.config.has_decoder or not reads_sentinels:
            if vocabulary.mask is None:
                raise SettingError(f"the vocabulary of {self.stage.folder} {self._why_no_gaps()}")
            return self.encode(text), []
        if count > vocabulary.num_sentinels:
            raise SettingError(
                f"{count} gaps are more than the vocabulary's {vocabulary.num_sentinels} sentinels"
            )
        sentinels = [vocabulary.vocab_size - 1 - k for k in range(count)]
        eos = vocabulary.eos if knows_eos(self.stage) else None
        ids = [*vocabulary.encode_replacing_masks(text, sentinels), eos]
        return [token for token in ids if token is not None], sentinels

    def _why_no_gaps(self) -> str:
        """Return why the vocabulary has nothing that marks a gap, and what to do, for a message."""
        if not self.config.has_decoder:
            return "has no mask; name the run of a model that has one"
        if why := self.vocabulary.unusable_sentinels:
            mend = "renumber them and their rows of the embedding, and import again"
            return f"has no sentinels: {why}; {mend}"
        return "has neither sentinels nor a mask; name the run of a model that has them"

    def encode_continuation(self, prompt: str, answer: str) -> tuple[list[int], list[int]]:
        """Return the ids of a prompt, and of an answer after a blank, for ``lm.evaluate.loglikelihood``."""
        config, encode = self.config, self.vocabulary.encode
        prompt_ids = self.encode_data(prompt)
        if config.has_encoder:
            answer_ids = encode(answer)
            if config.special.eos is not None and knows_eos(self.stage):
                answer_ids = [*answer_ids, config.special.eos]
            return prompt_ids, answer_ids
        before, whole = encode(prompt), encode(f"{prompt} {answer}")
        if whole[: len(before)] == before:
            answer_ids = whole[len(before) :]
        else:  # a token of the whole text spans the end of the prompt
            answer_ids = encode(answer)
        return without_start(prompt_ids, config), answer_ids

    def batch(self, rows: Sequence[Sequence[int]], answer: int = 1) -> Batch:
        """Return ``host_batch`` on the devices."""
        return self.shard_batch(self.host_batch(rows, answer))

    def host_batch(self, rows: Sequence[Sequence[int]], answer: int = 1) -> Batch:
        """Return sequences of ids as a padded batch.

        SettingError for an empty sequence, and if the model has no room for ``answer`` more tokens.
        """
        config = self.config
        if not rows or not all(rows):
            raise SettingError("a text without tokens gives the model nothing to continue")
        shape = (-(-len(rows) // self.devices) * self.devices, max(map(len, rows)))
        longest = max(shape[1], answer) if config.has_encoder else shape[1] + answer - 1
        if config.has_max_length and longest > config.positions.max_length:
            text = f"{shape[1]} tokens of text and {answer} of answer"
            raise SettingError(
                f"{text} do not fit in model.positions.max_length={config.positions.max_length}"
            )
        tokens, segments = np.full(shape, config.special.pad, np.int32), np.zeros(shape, np.int32)
        for i, row in enumerate(rows):
            tokens[i, : len(row)], segments[i, : len(row)] = row, 1
        return prompt_batch(config, tokens, segments)


def open_run(folder: Path, stages: Sequence[Stage], name: str = "", option: str = "--mixture") -> Trained:
    """Open the model of the run in ``folder`` after the stage ``name``, by default ``model_of_run``'s.

    stages: those of the run to choose from. option: as for ``describe_model``.
    """
    cache_compiled(find_cache(folder))
    models = {stage.name: stage for stage in networks(stages) if stage.has_text_model}
    stage = select_stage(folder, models, name, option)
    mesh = sharding.make_mesh(stage.settings.mesh)
    model = stage.restore_transformer(mesh)
    return Trained(
        stage,
        stored_vocabulary(stage.folder, stage.settings),
        model,
        stage.transformer_steps(mesh).shard_batch,
        devices=mesh.size,
        description=describe_model(folder, stage.name, models, option, stage.progress_if_unfinished),
    )


def networks(stages: Sequence[Stage]) -> list[NetworkStage]:
    """Return ``stages``, which all train networks; SettingError for models made of counts."""
    found = [stage for stage in stages if isinstance(stage, NetworkStage)]
    for stage in stages:
        if stage not in found:
            model = stage.settings.counts.model
            raise SettingError(
                f"{stage.folder}: counts.model={model!r} is made of counts, and this needs a network"
            )
    return found


@dataclass(frozen=True)
class TrainedNgrams:
    """Holds the n-gram model of a run, whose n-grams are of ids of its vocabulary."""

    model: KneserNey
    vocabulary: Tokenizer
    description: str  # names the run and the stage


def open_ngrams(folder: Path, name: str = "") -> TrainedNgrams | None:
    """Open the n-gram model of the run in ``folder``; return None for a run of another model.

    Raises SettingError for a ``name`` that is not that of its stage.
    """
    stages = {stage.name: stage for stage in stages_of(folder) if isinstance(stage, Ngrams)}
    if not stages:
        return None
    stage = select_stage(folder, stages, name)
    description = describe_model(folder, stage.name, stages)
    return TrainedNgrams(stage.model(), stored_vocabulary(stage.folder, stage.settings), description)


def texts_of_run(trained: Trained, max_length: int | None = None) -> TrainableModel:
    """Return a run's model with the methods of ``lm.notebook``, which take texts.

    max_length: the most tokens of a text; None: as ``text_model`` decides.
    """
    ids = boundary_ids(trained.stage, trained.vocabulary)
    texts = text_model(trained.model, trained.vocabulary, trained.shard_batch, ids, max_length)
    return replace(texts, pool=pooling(trained.stage.settings))


def open_texts(folder: Path, name: str = "", option: str = "--mixture") -> tuple[TrainableModel, str]:
    """Return the model of a run with its head, whose methods take texts, and the model's description."""
    trained = open_run(folder, stages_of(folder), name, option)
    return with_head(texts_of_run(trained), trained.stage), trained.description


def with_head(texts: TrainableModel, stage: NetworkStage) -> TrainableModel:
    """Return the model of a run with the head of its stage, if the stage has one, so that it predicts."""
    if not isinstance(stage, HeadFinetuning):
        return texts
    settings = stage.settings
    model = stage.trained_with_head(sharding.make_mesh(settings.mesh))
    reader = reader_of(settings, stage.task, texts.tokenizer)
    return replace(texts, head=TextHead(model, reader, model.settings.pool, cast(Any, texts.shard_batch)))


def language_models(stages: Sequence[Stage], name: str) -> list[Stage]:
    """Return the stages among which a command that needs probabilities of tokens chooses.

    Unless a stage is named, those with a head are left out: their training leaves out the output matrix.
    """
    without_head = [stage for stage in stages if name or not stage.has_head]
    return without_head or [*stages]


def embedding_of(folder: Path, stages: Mapping[str, NetworkStage], name: str) -> tuple[WordVectors, str]:
    """Return the embedding of each token after the stage ``name``, and the model's description.

    By default it is the embedding of skip-gram or, in a run without, of ``model_of_run``'s stage.
    """
    default = next((each for each, stage in stages.items() if not stage.has_text_model), "")
    stage = select_stage(folder, stages, name or default, "--stage")
    params = stage.restore_state(sharding.make_mesh(stage.settings.mesh)).params
    description = describe_model(folder, stage.name, stages, "--stage", stage.progress_if_unfinished)
    table = token_embeddings(params, description)
    ids_by_token = stored_vocabulary(stage.folder, stage.settings).vocab
    return WordVectors(tuple(ids_by_token), table[list(ids_by_token.values())]), description


def token_embeddings(params: Mapping[str, Any], description: str) -> np.ndarray:
    """Return the input embedding of each token id, [V,D], from parameters by name.

    Raises SettingError if its vectors have several widths. ``description`` names the model in the message.
    """
    for name, table in params.items():
        if f".{name}".endswith(EMBEDDING):
            return np.asarray(table)
    raise SettingError(
        f"{description} has no single table of embeddings: model.embedding.clusters have vectors of several "
        "widths"
    )


def select_stage(folder: Path, models: Mapping[str, T], name: str, option: str = "--mixture") -> T:
    """Return the entry of ``models`` for the stage ``name`` or, if that is empty, for ``model_of_run``'s.

    SettingError, with the nearest name, if there is no such stage.
    models: name of a stage -> the stage, or what belongs to it.
    option: the command-line option that gave the name, for the message; empty in Python.
    """
    if not models:
        raise SettingError(
            f"{folder} has no model for this: its settings ask for neither pre-training nor fine-tuning "
            "that trains one (pretraining.steps, finetuning.steps, tuning)"
        )
    if name and name not in models:
        named = f"{option} {name!r}".lstrip()
        raise SettingError(f"{named} is no part of {folder}{did_you_mean(name, models)}")
    return models[name or model_of_run(models)]


def generative_stages(folder: Path) -> list[NetworkStage]:
    """Return the stages of a run whose model generates text; SettingError if its models do not."""
    stages = networks(stages_of(folder))  # first: counts are refused before an architecture that they lack
    if not load_settings(folder).model.has_decoder:
        raise SettingError("model.architecture='encoder' writes no text; `lm generate` fills its [MASK]s")
    return [stage for stage in stages if stage.has_text_model and not stage.has_head]


def mask_filling_stages(folder: Path, gaps: str = MASK) -> list[NetworkStage]:
    """Return the pre-trainings of a model that fills gaps: a masked LM or a denoising encoder-decoder.

    Raises SettingError for another model. ``gaps``: the marks of gaps in the prompt, for the message.
    """
    networks_of_run = networks(stages_of(folder))  # first: counts are refused before an architecture
    experiment = load_settings(folder)
    model = experiment.model
    input_formats = {denoiser.objective.inputs for denoiser in experiment.objective.denoisers}
    text = f"{folder}: a model with architecture={model.architecture!r}"
    if not model.has_encoder:
        what = "writes what follows a text and fills no gaps"
        raise SettingError(f"{text} {what}; leave {gaps} out of --prompt")
    if not model.has_decoder and model.output.logits == "none":
        raise SettingError(
            f"{text} and output.logits={model.output.logits!r} is no masked LM; "
            f"name the run of one, such as bert/base"
        )
    if not model.published and input_formats <= UNMARKED_INPUTS:
        what = f"and objective.inputs={'|'.join(sorted(input_formats))!r} never read a gap that is marked"
        raise SettingError(f"{text} {what}; name the run of another, such as bart/base")
    stages = [stage for stage in networks_of_run if stage.is_pretraining]
    if not stages:
        raise SettingError(f"{folder}: pretraining.steps=0: nothing was pre-trained; name another run")
    return stages
