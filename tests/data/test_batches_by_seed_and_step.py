"""Laws of the batches: pure functions of (seed, step), whoever makes them."""

import itertools
import time
from dataclasses import replace

import numpy as np
import pytest

from lm.batch import concatenate
from lm.config.base import SettingError
from lm.data.batches import Batches, stream
from lm.data.corpus.sampler import CorpusSampler, WindowPosition
from lm.data.corpus.shards import InMemoryShard, split_shards
from lm.data.corpus.token_cache import EncodedCorpus, in_memory_corpus
from lm.data.corpus.token_cache import concatenate as concatenate_texts
from lm.data.packing import ENCODER_DECODERS
from lm.data.pretraining import pretraining_rows
from lm.data.segments import SegmentedWindow, concatenate_documents
from lm.data.seq2seq import CorpusExamples, MixtureRows, eval_batches
from lm.objectives.denoising import OBJECTIVES, Lengths, Objective
from lm.tokenizers.sentencepiece import ByteTokenizer
from lm.tokenizers.tokenizer import EOS, PAD

VOCABULARY = ByteTokenizer(100)
PAIRS = [
    (name, architecture)
    for name, architecture in itertools.product(sorted(OBJECTIVES), ("encoder-decoder", "prefix-decoder"))
    if (OBJECTIVES[name].has_inputs or architecture != "encoder-decoder") and not OBJECTIVES[name].is_mlm
]
LIMITS = Lengths(0, 8, 5)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """41 documents of 1 to about 200 tokens, no character of which is a sentinel or special."""
    rng = np.random.default_rng(0)
    texts = ["".join(map(chr, rng.integers(97, 123, size))) for size in [*rng.integers(2, 200, 40), 1]]
    return in_memory_corpus(texts, VOCABULARY, tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def dealt(corpus):
    """The same documents for four streams, in two shards of many windows."""
    (texts,) = corpus.shards
    shards = split_shards(
        [InMemoryShard(texts.documents[:15]), InMemoryShard(texts.documents[15:], "others")], 4
    )
    return EncodedCorpus(tuple(shards), VOCABULARY, corpus.folder, 300, 4)


@pytest.fixture
def batches(corpus):
    def make(name="span-corruption", architecture="encoder-decoder", read=corpus, **settings):
        settings = {"inputs_length": 32, "batch_size": 8, "seed": 5} | settings
        objective = OBJECTIVES[name] if isinstance(name, str) else name
        streams = CorpusSampler(
            read, read.num_streams, settings.pop("seed"), index_folder=settings.pop("notes", None)
        )
        rows = pretraining_rows(streams, objective, architecture=architecture, **settings)
        return Batches(rows, settings["batch_size"])

    return make


def only(made):
    """The window of a corpus that has one."""
    (position,) = {
        rows.position for rows in made.row_source.reader.find_rows(np.arange(4), lambda _: 10, "any")
    }
    return made.row_source.reader.read_window(position)


@pytest.fixture
def tasks():
    examples = {
        "few": [([10 + i], [50 + i]) for i in range(3)],
        "many": [([100 + i], [150]) for i in range(20)],
    }
    return Batches(MixtureRows(examples, {"few": 1.0, "many": 3.0}, "encoder-decoder", LIMITS, seed=1), 8)


def same(one, other):
    one, other = one.features(), other.features()
    assert one.keys() == other.keys()
    assert all((one[name] == other[name]).all() for name in one)


@pytest.mark.parametrize(("name", "architecture"), PAIRS)
def test_a_batch_is_the_same_whole_in_parts_and_made_anew(batches, dealt, name, architecture):
    first, second = (batches(name, architecture, dealt) for _ in range(2))
    for step in (40, 2, 7):  # over several epochs, and not in order
        whole = first(step, slice(None))
        parts = [second(step, slice(start, start + 2)) for start in (6, 0, 4, 2)]
        same(whole, concatenate([parts[i] for i in (1, 3, 2, 0)]))
    other = batches(name, architecture, dealt, seed=6)(7, slice(None))
    assert any((value != whole.features()[key]).any() for key, value in other.features().items())


@pytest.mark.parametrize(("name", "architecture"), PAIRS)
def test_rows_have_their_shape_and_where_examples_end_every_segment_ends_with_eos(
    batches, name, architecture
):
    made = batches(name, architecture)
    batch = made(3, slice(None))
    inputs, targets = made.lengths[1:]
    length = targets if architecture in ENCODER_DECODERS else inputs + targets
    assert batch.decoder.targets.shape == (8, length)
    assert all(
        value.dtype == {"decoder_loss_weights": np.float32, "decoder_content": bool}.get(key, np.int32)
        for key, value in batch.features().items()
    )
    ids, segments = batch.decoder.targets, batch.decoder.segment_ids
    ends = (segments > 0) & (np.pad(segments, ((0, 0), (0, 1)))[:, 1:] != segments)
    assert (ids[ends] == EOS).all() != made.row_source.reader.objective.eos_between_documents
    if architecture in ENCODER_DECODERS:
        assert (batch.encoder.segment_ids.max(1) == segments.max(1)).all()
        assert batch.encoder.tokens.shape == (8, inputs)


def examples_of(batch, name, kind):
    """The tokens of each example on one side of a batch, [] for one that has none there."""
    side = batch.side(name)
    counts = np.max([each.segment_ids.max(1) for each in batch.sides.values()], axis=0)
    return [
        getattr(side, kind)[row][side.segment_ids[row] == segment].tolist()
        for row, count in enumerate(counts)
        for segment in range(1, 1 + count)
    ]


WITHOUT_EOS = {
    **{name: OBJECTIVES[name] for name, _ in PAIRS},
    "spans-apart": replace(OBJECTIVES["span-corruption"], documents="apart"),
    "suffix-share": Objective("suffix-share", rate=0.5),
    "prefix-suffix-middle": Objective("middle", "prefix-suffix-middle", "drop"),
}


@pytest.mark.parametrize(
    ("name", "architecture"),
    [
        *PAIRS,
        ("spans-apart", "encoder-decoder"),
        ("spans-apart", "decoder"),
        ("suffix-share", "decoder"),
        ("prefix-suffix-middle", "decoder"),
    ],
)
def test_without_eos_rows_hold_the_same_examples_less_their_eos(batches, name, architecture):
    objective = WITHOUT_EOS[name]
    without = batches(replace(objective, eos="none"), architecture)
    ends, room = replace(objective, eos="each-example"), 32
    while (made := batches(ends, architecture, inputs_length=room)).lengths.raw < without.lengths.raw:
        room += 1  # for EOS
    assert made.lengths.raw == without.lengths.raw
    assert sum(made.lengths) > sum(without.lengths)
    found = [[each(step, slice(None)) for step in range(3)] for each in (made, without)]
    for side, kind in (("encoder", "tokens"), ("decoder", "targets")):
        if side not in found[0][0].sides:
            continue
        ended, bare = ([ids for batch in part for ids in examples_of(batch, side, kind)] for part in found)
        assert len(bare) >= len(ended) >= 3 * 8  # bare ones are shorter, so that more fit in a row
        for with_eos, without_eos in zip(ended, bare, strict=False):
            assert EOS in with_eos and EOS not in without_eos
            assert [token for token in with_eos if token != EOS] == without_eos


@pytest.mark.parametrize("architecture", ["encoder-decoder", "decoder", "prefix-decoder"])
def test_segment_ids_and_positions_tell_packed_examples_without_eos_apart(batches, architecture):
    batch = batches(replace(OBJECTIVES["prefix-lm"], eos="none"), architecture)(2, slice(None))
    assert batch.decoder.segment_ids.max() > 1
    for name, side in batch.sides.items():
        assert all(found == list(range(len(found))) for found in examples_of(batch, name, "positions"))
        for ids in side.segment_ids:
            filled = ids[ids > 0]
            assert (np.diff(filled) >= 0).all() and not ids[len(filled) :].any()
    read, targets = (examples_of(batch, "decoder", kind) for kind in ("tokens", "targets"))
    for before, after in zip(read, targets, strict=True):  # the start token, not the neighbour's last one
        assert before == [PAD, *after][:-1]


def epoch_rows(made, epoch):
    """How many rows an epoch has, of a corpus of one window."""
    return made.row_source.count_rows(WindowPosition(0, epoch, 0, 0, 0, 0))


@pytest.mark.parametrize("name", ["mass-style", "deshuffling", "prefix-lm", "causal-lm", "language-model"])
def test_an_epoch_holds_every_token_once_and_the_next_has_another_order_and_noise(batches, corpus, name):
    """Objectives whose rows spell out the text: all of it comes back in each epoch."""
    made = batches(name, "encoder-decoder" if OBJECTIVES[name].has_inputs else "decoder", batch_size=1)
    first, second = (epoch_rows(made, epoch) for epoch in (0, 1))
    steps = range(first), range(first, first + second)
    epochs = [[made(step, slice(None)) for step in epoch] for epoch in steps]
    seen = []
    for epoch in epochs:
        sides = (
            ("encoder_input_tokens", "decoder_target_tokens")
            if name == "prefix-lm"
            else ("decoder_target_tokens",)
        )
        ids = np.concatenate([batch.features()[side].ravel() for batch in epoch for side in sides])
        assert np.sort(ids[ids > EOS]).tolist() == np.sort(corpus.first().tokens).tolist()
        key = "encoder_input_tokens" if OBJECTIVES[name].has_inputs else "decoder_target_tokens"
        seen.append(np.concatenate([batch.features()[key].ravel() for batch in epoch]))
    assert len(seen[0]) != len(seen[1]) or (seen[0] != seen[1]).any()
    if name == "mass-style":
        order = [sorted(batch.decoder.targets[0].tolist() for batch in epoch) for epoch in epochs]
        noise = [sorted(batch.encoder.tokens[0].tolist() for batch in epoch) for epoch in epochs]
        assert order[0] == order[1]
        assert noise[0] != noise[1]


@pytest.mark.parametrize("name", ["baseline", "span-corruption", "deshuffling", "prefix-lm"])
def test_a_corpus_of_one_segment_has_other_noise_every_epoch(batches, tmp_path, name):
    read = in_memory_corpus(["abcdefghijklmnopqrstuvwxyz" * 4], VOCABULARY, tmp_path)
    made = batches(name, read=read, inputs_length=128)
    assert len(np.unique(made.row_source(np.arange(6)).encoder.tokens, axis=0)) >= 4


@pytest.mark.parametrize(
    ("name", "architecture"), [("causal-lm", "decoder"), ("text-infilling", "encoder-decoder")]
)
def test_one_eos_stands_between_two_documents_and_none_at_a_cut(batches, corpus, name, architecture):
    """Else a model learns to stop at the last place of a row, whatever stands there, and never where a text
    ends.
    """
    made = batches(name, architecture, batch_size=1)
    rows = [made(step, slice(None)) for step in range(epoch_rows(made, 0))]
    rows = [row.decoder.targets[row.decoder.segment_ids > 0].tolist() for row in rows]
    order = np.argsort(made.row_source.reader.shuffle_segments(WindowPosition(0, 0, 0, 0, 0, 0)))
    tokens, offsets, *_ = corpus.first()
    documents = [tokens[begin:end].tolist() for begin, end in itertools.pairwise(offsets)]
    strung = [token for document in documents for token in (*document, EOS)]
    assert [token for place in order for token in rows[place]] == strung
    assert sum(len(row) == 32 for row in rows) == len(strung) // 32  # no place of a row is lost to an end


def test_documents_without_tokens_leave_no_second_eos():
    offsets, whole = np.array([0, 0, 2, 2, 2, 5, 6, 6]), [10, 11, EOS, 12, 13, 14, EOS, 15, EOS]
    for after_last, expected in ((True, whole), (False, whole[:-1])):
        text = concatenate_documents(np.arange(10, 16), offsets, EOS, after_last=after_last)
        assert text.read(np.arange(text.length)).tolist() == expected
    none = concatenate_documents(np.arange(3), np.array([0, 1, 3]), None, after_last=True)
    assert none.read(np.arange(none.length)).tolist() == [0, 1, 2]


def test_texts_joined_end_as_the_last_of_them_does(corpus):
    whole = corpus.first()
    cut = whole.truncate(int(whole.offsets[1]) - 1)
    assert cut.is_truncated and not whole.is_truncated
    assert concatenate_texts([whole, cut]).is_truncated
    assert not concatenate_texts([cut, whole]).is_truncated
    assert not concatenate_texts([]).is_truncated


def test_a_document_that_is_cut_has_no_end(corpus):
    whole = corpus.first()
    first, second = whole.offsets[1:3].tolist()
    cuts = {first: False, second - 1: True, second: False, len(whole.tokens): False}
    assert {count: whole.truncate(count).is_truncated for count in cuts} == cuts
    for count, goes_on in cuts.items():
        text = SegmentedWindow(whole.truncate(count), OBJECTIVES["causal-lm"], ByteTokenizer(100), 32).text
        assert (text.read(np.array([text.length - 1]))[0] != EOS) == goes_on


@pytest.mark.parametrize("name", ["span-corruption", "prefix-lm"])
def test_documents_are_strung_together_or_kept_apart(batches, corpus, name):
    segments, (tokens, offsets, *_) = only(batches(name)).segments, corpus.first()
    begins = set(offsets.tolist())
    assert segments.lengths.sum() == len(tokens)
    if name == "prefix-lm":
        assert begins - {len(tokens)} <= set(segments.starts.tolist())
    else:
        assert (segments.lengths[:-1] == segments.lengths[0]).all()


def test_two_full_prefix_lm_examples_fill_a_row_of_a_decoder(batches, tmp_path):
    made = batches("prefix-lm", "decoder", in_memory_corpus(["x" * 3000], VOCABULARY, tmp_path))
    assert made.row_source(np.arange(8)).decoder.loss_weights.all()


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_stream_is_the_same_for_any_number_of_workers(batches, dealt, workers):
    made = batches("prefix-lm", read=dealt)
    streamed = list(stream(made, 3, 8, workers=workers))
    assert len(streamed) == 5
    for step, batch in zip(range(3, 8), streamed, strict=True):
        same(batch, made(step, slice(None)))


HOSTS = [(slice(0, 2), slice(6, 8)), (slice(2, 6),)]  # rows of a batch of 8; a pod's network may part them so


def test_two_hosts_together_have_the_batch_of_one_and_a_resumed_stream_goes_on(batches, dealt, tasks):
    for made in (batches("prefix-lm", "prefix-decoder", dealt), tasks):
        whole = list(stream(made, 0, 4))
        hosts = [list(stream(made, 0, 4, rows=rows)) for rows in HOSTS]
        resumed = list(stream(made, 2, 4))
        for step in range(4):
            order = np.argsort([*range(2), *range(6, 8), *range(2, 6)])
            same(
                whole[step],
                concatenate([host[step] for host in hosts]).map(lambda rows, order=order: rows[order]),
            )
            if step >= 2:
                same(whole[step], resumed[step - 2])


def test_tasks_are_mixed_by_rate_and_each_epoch_reshuffled(tasks):
    ids = np.concatenate([tasks(step, slice(None)).encoder.tokens for step in range(30)])
    few, many = ids[(ids > 1) & (ids < 100)], ids[ids >= 100]
    assert len(few) == 120  # two examples a row
    assert len(many) == 360
    for found, size in ((few, 3), (many, 20)):
        epochs = found.reshape(-1, size)
        assert (np.sort(epochs) == np.sort(epochs[0])).all()
        assert len(np.unique(epochs, axis=0)) > 1


def test_a_corpus_is_a_task_of_a_mixture_with_new_noise_on_each_pass(batches):
    for name in ("mass-style", "prefix-lm"):
        source = batches(name).row_source
        examples, count = CorpusExamples(source), len(only(batches(name)).segments.starts)
        passes = [
            [[side.ids.tolist() for side in examples[i + p * count]] for i in range(count)] for p in (0, 1)
        ]
        text = [
            [example[1] if name == "mass-style" else sum(example, []) for example in each] for each in passes
        ]
        assert text[0] != text[1]
        assert sorted(text[0]) == sorted(text[1])
        assert passes[0] != passes[1]
    tasks = {"text": examples, "few": [([5], [6])]}
    mixed = MixtureRows(tasks, {"text": 1.0, "few": 1.0}, "encoder-decoder", source.lengths, seed=0)(
        np.arange(8)
    )
    firsts = mixed.decoder.targets[(mixed.decoder.positions == 0) & (mixed.decoder.segment_ids > 0)]
    assert abs((firsts == 6).mean() - 0.5) <= 1 / len(firsts)


@pytest.mark.parametrize("architecture", ["decoder", "prefix-decoder"])
def test_a_mixture_with_the_loss_on_targets_weighs_targets_and_their_ends_alone(architecture):
    examples = [([20 + i] * 3, [100 + i] * 2) for i in range(7)] * 100  # grain shuffles few slowly
    rows = MixtureRows({"task": examples}, {"task": 1.0}, architecture, Lengths(0, 12, 12), seed=0)
    weighted, whole = (replace(rows, loss=loss)(np.arange(4)).decoder for loss in ("targets", "all-tokens"))
    np.testing.assert_array_equal(weighted.targets, whole.targets)
    of_targets = weighted.targets >= 100
    ends = np.roll(of_targets, 1, axis=1) & (weighted.targets == 1)
    np.testing.assert_array_equal(weighted.loss_weights > 0, of_targets | ends)
    assert (whole.loss_weights[(whole.targets >= 20) & ~of_targets] == 1).all()


@pytest.mark.parametrize("architecture", ["encoder-decoder", "prefix-decoder"])
def test_a_mixture_fills_each_row_in_order_and_makes_any_row_alone(architecture):
    draw = np.random.default_rng(0)
    examples = [[[i % 250 + 3] * draw.integers(1, 12) for _ in range(2)] for i in range(500)]
    lengths = Lengths(0, 24, 20)
    mixed = MixtureRows({"task": examples}, {"task": 1.0}, architecture, lengths, seed=0)
    whole, order = mixed(np.arange(300)), draw.permutation(300)[:12]  # each makes a block anew
    for name, rows in mixed(order).features().items():
        assert (rows == whole.features()[name][order]).all()
    segments = [side.segment_ids for side in whole.sides.values()]
    room = [24, 20] if len(segments) == 2 else [44]
    used = np.stack([(side > 0).sum(1) for side in segments], axis=1)
    first = np.stack([(side == 1).sum(1) for side in segments], axis=1)
    joined = np.arange(299) % 128 != 127  # a row and the next, where they are of one block
    assert (used <= room).all()
    assert ((used[:-1] + first[1:])[joined] > room).any(axis=1).all()
    read = sum(segments[-1].max(1)[:128])
    tokens = [row[row > 1] for row in whole.decoder.targets[:128]]
    expected = [mixed._dataset[number] for number in range(read)]
    sides = slice(1, 2) if len(segments) == 2 else slice(None)
    assert np.concatenate(tokens).tolist() == [
        id for example in expected for side in example[sides] for id in side
    ]


def test_evaluation_takes_every_example_once_in_order_and_fills_up_with_padding():
    examples = [([10 + i], [20 + i]) for i in range(5)]
    found = eval_batches(examples, architecture="encoder-decoder", lengths=LIMITS, batch_size=4)
    ids = np.concatenate([batch.decoder.targets for batch in found])
    assert ids[:, 0].tolist() == [20, 21, 22, 23, 24, 0, 0, 0]
    assert found[1].decoder.segment_ids.sum(1).tolist() == [2, 0, 0, 0]
    assert eval_batches([], architecture="decoder", lengths=LIMITS, batch_size=4) == []


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"architecture": "encoder-decodr"}, "did you mean 'encoder-decoder'"),
        ({"name": "causal-lm"}, "objective.noise"),
        (
            {"name": replace(OBJECTIVES["prefix-lm"], eos="between-documents")},
            "objective.eos='between-documents'",
        ),
        (
            {"name": replace(OBJECTIVES["masked-lm"], eos="none"), "architecture": "encoder"},
            "objective.eos='none' suits a model with a decoder",
        ),
        ({"seed": -1}, "seed=-1"),
        ({"inputs_length": 1}, "data.inputs_length=1"),
    ],
)
def test_a_setting_that_cannot_be_is_refused_by_name(batches, settings, field):
    with pytest.raises(SettingError, match=field):
        batches(**settings)


def test_streams_and_mixtures_refuse_by_name(batches, corpus):
    with pytest.raises(SettingError, match="objective.eos='between-documents'"):
        CorpusExamples(batches("causal-lm", "decoder").row_source)
    with pytest.raises(SettingError, match="objective.eos='none'.*decoding of an answer stops at EOS"):
        CorpusExamples(batches(replace(OBJECTIVES["prefix-lm"], eos="none")).row_source)
    with pytest.raises(SettingError, match="data.workers=-1"):
        stream(batches(), 0, 1, workers=-1)
    common = {"architecture": "decoder", "lengths": LIMITS, "seed": 0}
    for examples, rates, words in (
        ({"a": []}, {"a": 1}, "no examples"),
        ({"a": [([5], [6])]}, {}, "rate of task 'a'"),
    ):
        with pytest.raises(SettingError, match=words):
            MixtureRows(examples, rates, **common)
    with pytest.raises(SettingError, match="writes no text"):
        eval_batches([], architecture="encoder", lengths=LIMITS, batch_size=1)
    with pytest.raises(SettingError, match="no sentinels"):
        batches("baseline", "decoder", replace(corpus, tokenizer=ByteTokenizer(0)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "rate"),
    [
        ("span-corruption", 5),
        ("causal-lm", 5),
        ("masked-lm", 5),
        ("whole-word-masked-lm", 5),
        ("span-masked-lm", 1),
        ("text-infilling", 1),
    ],
)
def test_one_core_makes_millions_of_tokens_a_second(batches, tmp_path, name, rate):
    text = "".join(map(chr, np.random.default_rng(0).integers(97, 123, 2_000_000)))
    texts = text.replace("z", " ").replace("x ", ". ").split("ab")
    objective = OBJECTIVES[name]
    architecture = "encoder-decoder" if objective.has_inputs else "decoder"
    architecture = "encoder" if objective.is_mlm else architecture
    read = in_memory_corpus(texts, VOCABULARY, tmp_path, 16)
    made = batches(name, architecture, read, inputs_length=512, batch_size=128)
    made(0, slice(None))
    times = []
    for step in range(40):
        begin = time.thread_time()
        made(step, slice(None))
        times.append(time.thread_time() - begin)
    assert 128 * made.lengths.raw / np.median(times) >= rate * 1e6
