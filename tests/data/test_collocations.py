"""Laws of PMI masking: the measure, the units that a text is cut into, their mask, and the file of a run."""

import pickle
from collections import Counter
from itertools import combinations, pairwise
from math import log, prod
from types import SimpleNamespace

import numpy as np
import pytest
from golden.make_batches import CORPUS, VOCABULARY, OneWindow

from experiments.evaluate.examples import show_examples
from experiments.runs import provenance
from experiments.runs.collocations import collocations_path, find_collocations
from experiments.runs.sources import Sources
from experiments.runs.stages import stages
from experiments.study.registry import build
from lm.config.base import DataError, SettingError
from lm.data import collocations
from lm.data.collocations import Collocations
from lm.data.corpus.sampler import CorpusSampler
from lm.data.corpus.token_cache import EncodedDocuments
from lm.data.pretraining import pretraining_rows
from lm.objectives.denoising import OBJECTIVES
from lm.tokenizers.sentencepiece import ByteTokenizer

WORD_STARTS = np.arange(20) % 2 == 0  # an odd token continues a word


def documents(count=40, seed=0):
    """Words of one or two tokens, drawn so that some follow each other often."""
    random = np.random.default_rng(seed)
    phrases = [[2, 3, 4], [6, 4, 8, 9], [4, 8], [2], [6], [8, 9], [2, 3, 4, 6, 8, 10, 11]]
    texts = [
        np.concatenate([phrases[k] for k in random.integers(0, len(phrases), random.integers(1, 20))])
        for _ in range(count)
    ]
    return EncodedDocuments(np.concatenate(texts).astype(np.uint16), np.cumsum([0, *map(len, texts)]))


def words_of(tokens):
    cuts = [i for i, token in enumerate(tokens) if i == 0 or WORD_STARTS[token]]
    return [tuple(tokens[a:b]) for a, b in pairwise([*cuts, len(tokens)])]


def test_pmi_is_the_least_over_all_segmentations_of_the_log_ratio_of_probabilities():
    text = documents()
    counts = Counter()
    for begin, end in pairwise(text.offsets.tolist()):
        words = words_of(text.tokens[begin:end].tolist())
        for length in range(1, 6):
            counts.update(tuple(words[i : i + length]) for i in range(len(words) - length + 1))
    totals = Counter()
    for ngram, count in counts.items():
        totals[len(ngram)] += count

    def p(ngram):
        return counts[ngram] / totals[len(ngram)]

    due = {}
    for ngram in counts:
        cuts = [cut for k in range(1, len(ngram)) for cut in combinations(range(1, len(ngram)), k)]
        ratios = [
            log(p(ngram) / prod(p(ngram[a:b]) for a, b in pairwise((0, *cut, len(ngram))))) for cut in cuts
        ]
        if cuts and counts[ngram] >= 3 and min(ratios) > 0:
            due[sum(ngram, ())] = (len(ngram), counts[ngram], pytest.approx(min(ratios), abs=1e-8))
    found = collocations.find_collocations(text, WORD_STARTS, 10**6, min_count=3)
    assert {each.tokens: each[1:] for each in found} == due
    assert {each.num_words for each in found} == {2, 3, 4, 5}
    few = collocations.find_collocations(text, WORD_STARTS, 8, min_count=3)
    best = [[each for each in found if each.num_words == length] for length in (2, 3, 4, 5)]
    assert few == [*best[0][:4], *best[1][:2], *best[2][:1], *best[3][:1]]
    assert all(a.pmi >= b.pmi for ranked in best for a, b in pairwise(ranked))


def test_a_unit_is_the_longest_collocation_and_of_two_that_overlap_the_one_with_the_lower_number():
    text = documents(12, seed=1)
    sequences = [(2, 3, 4), (4, 6), (4, 8, 9), (6, 4), (2, 3, 4, 6, 8, 10, 11), (8, 9, 2), (6, 8)]
    random = np.random.default_rng(0)
    tokens = text.tokens[: len(text.tokens) // 30 * 30].reshape(-1, 30).astype(np.int32)
    starts, breaks = WORD_STARTS[tokens], random.random(tokens.shape) < 0.05
    uniforms = random.integers(0, 50, tokens.shape).astype(np.float32) / 50  # some are equal
    units = Collocations(sequences).unit_starts(tokens, starts, breaks, uniforms)
    dropped = 0
    for row in range(len(tokens)):
        ids, begins, stops = tokens[row].tolist(), [*starts[row], True], [*breaks[row], True]
        spans = {
            (i, i + len(each))
            for each in sequences
            for i in range(len(ids))
            if tuple(ids[i : i + len(each)]) == each
            and begins[i]
            and (begins[i + len(each)] or stops[i + len(each)])
            and not any(stops[i + 1 : i + len(each)])
        }
        outermost = [s for s in spans if not any(a <= s[0] and s[1] <= b and (a, b) != s for a, b in spans)]
        due, taken = starts[row].copy(), np.zeros(30, bool)
        for begin, end in sorted(outermost, key=lambda span: (uniforms[row, span[0]], span)):
            dropped += taken[begin:end].any()
            if not taken[begin:end].any():
                taken[begin:end], due[begin + 1 : end] = True, False
        assert units[row].tolist() == due.tolist()
    assert dropped > 5


def test_collocations_may_be_arrays_of_ids_as_tokenizers_return_them():
    sequences = [(2, 3, 4), (4, 6)]
    arrays = Collocations([np.array(sequence, np.int32) for sequence in sequences])
    assert arrays.fingerprint == Collocations(sequences).fingerprint
    assert (arrays.keys == Collocations(sequences).keys).all()


def rows(name, found=None, **settings):
    sampler = CorpusSampler(OneWindow(CORPUS, VOCABULARY), 1, 7)
    settings = {"architecture": "encoder", "inputs_length": 64, "batch_size": 200} | settings
    return pretraining_rows(sampler, OBJECTIVES[name], **settings, collocations=found)


def test_a_collocation_is_hidden_as_a_whole_or_not_at_all_and_the_share_of_hidden_tokens_is_the_rate():
    made = CORPUS.tokens.copy()
    pair = np.array([30, 31, 33])  # two words of this vocabulary; none of them is elsewhere
    made[np.isin(made, pair)] = 60
    for begin in range(0, len(made) - 4, 8):
        made[begin : begin + 4] = [*pair, 60]  # which begins a word
    text = OneWindow(EncodedDocuments(made, CORPUS.offsets), VOCABULARY)
    source = pretraining_rows(
        CorpusSampler(text, 1, 7),
        OBJECTIVES["pmi-masked-lm"],
        architecture="encoder",
        inputs_length=64,
        batch_size=200,
        collocations=Collocations([pair.tolist()]),
    )
    batch = source(np.arange(200))
    targets, hidden = batch.encoder.targets, batch.encoder.loss_weights > 0
    places = np.argwhere((targets[:, :-2] == 30) & (targets[:, 1:-1] == 31) & (targets[:, 2:] == 33))
    shares = [hidden[row, place : place + 3].mean() for row, place in places]
    assert len(shares) > 1000 and set(shares) == {0, 1}
    is_text = (targets > 2) & (targets < 280)
    assert abs(hidden[is_text].mean() - 0.15) < 5 * np.sqrt(0.15 * 0.85 * 4 / is_text.sum())
    again = pickle.loads(pickle.dumps(source))(
        np.arange(150, 160)
    )  # as a resumed run, or a worker, reads them
    assert (again.encoder.tokens == batch.encoder.tokens[150:160]).all()


def test_without_collocations_the_mask_is_that_of_whole_words_bit_for_bit():
    none = rows("pmi-masked-lm", Collocations(()))(np.arange(50)).encoder
    words = rows("whole-word-masked-lm")(np.arange(50)).encoder
    assert (none.loss_weights == words.loss_weights).all() and (none.targets == words.targets).all()
    assert words.loss_weights.any()
    with pytest.raises(SettingError, match="needs the collocations of the text"):
        rows("pmi-masked-lm")


@pytest.fixture
def experiment(tmp_path):
    lines = [f'{{"text": "{i} has the return value of a call of the value"}}\n' for i in range(40)]
    (tmp_path / "a.jsonl").write_text("".join(lines))
    changes = {"data.corpus": f"jsonl:{tmp_path}/a.jsonl", "data.vocabulary": "bytes", "tuning.heads": ()}
    return build("bert/pmi", "nano", changes | {"finetuning.steps": 0, "model.vocab_size": 512})


def test_collocations_are_counted_once_kept_in_the_cache_and_counted_anew_if_their_file_is_damaged(
    experiment, tmp_path
):
    vocabulary, sources, said = ByteTokenizer(100), Sources(tmp_path / "cache"), []
    first = find_collocations(experiment, vocabulary, sources, said.append)
    path = collocations_path(experiment, vocabulary, sources)
    texts = {vocabulary.decode(each.tokens).strip() for each in collocations.load_collocations(path)}
    assert "return value" in texts and "the" not in texts
    assert find_collocations(experiment, vocabulary, sources, said.append).fingerprint == first.fingerprint
    assert len(said) == 1
    whole = path.read_bytes()
    path.write_bytes(whole[:-9])
    assert find_collocations(experiment, vocabulary, sources, said.append).fingerprint == first.fingerprint
    assert len(said) == 2 and path.read_bytes() == whole


@pytest.mark.parametrize(
    "line", [b"\xff", b"{", b"[]", b'{"tokens": 5, "num_words": 2, "occurrences": 9, "pmi": 1.0}']
)
def test_a_line_that_is_no_collocation_is_named(line, tmp_path):
    path, found = tmp_path / "a.jsonl", [collocations.Collocation((1, 2), 2, 11, 0.5)]
    collocations.save_collocations(path, found, ["caf\u00e9\u2028"])
    assert collocations.load_collocations(path) == found
    path.write_bytes(path.read_bytes() + line + b"\n")
    with pytest.raises(DataError, match="a.jsonl, line 2 should have tokens, .*: delete the file"):
        collocations.load_collocations(path)


def test_examples_show_the_hidden_words_of_a_collocation_as_one_text(experiment, tmp_path, capsys):
    show_examples(experiment, 8, tmp_path / "cache")
    hidden = [line for line in capsys.readouterr().out.splitlines() if line.strip().startswith("hidden")]
    texts = [text.strip() for line in hidden for text in line.partition("│")[2].split(" · ")]
    assert len(hidden) == 8 and any(" " in text for text in texts)  # a token is a byte


def test_a_stage_that_began_with_other_collocations_is_refused_as_with_other_data(experiment, tmp_path):
    *_, stage = stages(experiment)
    sources = Sources(tmp_path)
    one, other = (
        {"data": stage.data_fingerprints(SimpleNamespace(sources=sources, collocations=Collocations(found)))}
        for found in ([(3, 4)], [(3, 5)])
    )
    recorded = one | {"settings": {}, "vocabulary": {"fingerprint": ""}, "code": {}, "packages": {}}
    for state in ("begun", "finished"):
        folder, allow = tmp_path / state, frozenset()
        provenance.check(folder, recorded, "new", allow)
        provenance.check(folder, one, state, allow)
        with pytest.raises(SettingError, match=f"other data:\n  data: {provenance.COLLOCATIONS}: "):
            provenance.check(folder, other, state, allow)
    # `lm run` of a finished row compares its text alone, and counts nothing
    provenance.check(folder, {"data": stage.fingerprints(sources)}, "finished", allow)
