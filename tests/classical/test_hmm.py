"""The hidden Markov tagger: the course's estimates and joint probabilities, and what decoders must find."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest

from lm.classical.hmm import (
    Lattice,
    beam_search,
    estimate_tagger,
    load_tagger,
    save_tagger,
    tag_words,
)
from lm.config.base import DataError, SettingError
from lm.config.classical import HMMConfig
from lm.metrics import token_accuracy


def read(line):
    return [tuple(pair.split("/")) for pair in line.split()]


COURSE = [
    read("The/DT cat/NN sat/VBD on/IN the/DT mat/NN"),
    read("Princeton/NNP is/VBZ in/IN New/NNP Jersey/NNP"),
    read("The/DT old/NN man/VBP the/DT boat/NN"),
]
MODEL = estimate_tagger(COURSE, HMMConfig())
STATE = {name: number for number, name in enumerate(MODEL.tags)}


def words_of(sentence):
    return [word for word, _ in sentence]


def tags_of(sentence):
    return [name for _, name in sentence]


def emission(word, name):
    return MODEL.emissions([word])[0, STATE[name]]


def random_lattice(rng, length, tags):
    with np.errstate(divide="ignore"):  # some are impossible
        return Lattice(
            *(np.log(rng.random(s) * (rng.random(s) > 0.1)) for s in (tags, (tags, tags), (length, tags)))
        )


def lattices(count=60):
    rng = np.random.default_rng(0)
    return [random_lattice(rng, *rng.integers(1, 6, 2)) for _ in range(count)]


def test_a_sentence_begins_with_a_tag_as_often_as_in_training():
    assert MODEL.initial[STATE["DT"]] == 2 / 3
    assert MODEL.initial.sum() == 1


@pytest.mark.parametrize(
    ("before", "after", "prob"),
    [
        ("DT", "NN", 1),
        ("IN", "DT", 1 / 2),
        ("NN", "VBD", 1 / 4),
        ("NN", "VBP", 1 / 4),
        ("NNP", "NNP", 1 / 3),
        ("NNP", "VBZ", 1 / 3),
        ("IN", "NNP", 1 / 2),
    ],
)
def test_a_tag_follows_another_with_the_share_of_all_its_words(before, after, prob):
    assert MODEL.transitions[STATE[before], STATE[after]] == prob


def joint_log_prob(lattice, tag_ids):
    """log P(S, O) of tags int [T] and the words of the lattice [nats]."""
    transitions = lattice.transitions[tag_ids[:-1], tag_ids[1:]]
    emissions = lattice.emissions[np.arange(len(tag_ids)), tag_ids]
    return float(lattice.initial[tag_ids[0]] + transitions.sum() + emissions.sum())


def test_what_a_row_lacks_is_the_share_of_words_that_end_a_sentence():
    missing = 1 - MODEL.transitions.sum(1)
    assert missing[STATE["NN"]] == 2 / 4 and missing[STATE["NNP"]] == pytest.approx(1 / 3)
    assert missing[STATE["DT"]] == 0


def test_words_are_cased_and_emitted_with_their_share_of_the_tag():
    assert emission("cat", "NN") == 1 / 4
    assert emission("the", "DT") == emission("The", "DT") == 1 / 2
    assert emission("cat", "DT") == 0
    assert MODEL.emissions(MODEL.words).sum(0) == pytest.approx(1)


@pytest.mark.parametrize(("sentence", "inverse"), [*zip(COURSE, (1536, 2916, 384), strict=True)])
def test_the_course_s_joint_probabilities_and_tags(sentence, inverse):
    lattice, gold = MODEL.lattice(words_of(sentence)), [*map(MODEL.tags.index, tags_of(sentence))]
    assert math.exp(joint_log_prob(lattice, gold)) == pytest.approx(1 / inverse, rel=1e-12)
    for width in range(1, len(MODEL.tags) + 1):
        assert tag_words(MODEL, words_of(sentence), width) == tags_of(sentence)


def test_viterbi_finds_the_most_probable_of_all_paths():
    for lattice in lattices():
        length, tags = lattice.emissions.shape
        paths = np.array(list(itertools.product(range(tags), repeat=length)))
        probs = [joint_log_prob(lattice, path) for path in paths]
        found = beam_search(lattice, tags)
        assert found.log_prob == pytest.approx(max(probs), rel=1e-12)
        if max(probs) > -np.inf:
            assert found.tag_ids.tolist() == paths[np.argmax(probs)].tolist()


def test_a_beam_of_one_takes_the_best_tag_of_each_word_given_that_of_the_word_before():
    for lattice in lattices():
        states = [int((lattice.initial + lattice.emissions[0]).argmax())]
        for emitted in lattice.emissions[1:]:
            states.append(int((lattice.transitions[states[-1]] + emitted).argmax()))
        found = beam_search(lattice, 1)
        assert found.log_prob == pytest.approx(joint_log_prob(lattice, np.array(states)), rel=1e-12)
        if found.log_prob > -np.inf:
            assert found.tag_ids.tolist() == states


def test_a_path_has_its_joint_probability_and_none_beats_that_of_the_widest_beam():
    narrower = 0
    for lattice in lattices():
        length, tags = lattice.emissions.shape
        paths = [beam_search(lattice, width) for width in range(1, tags + 2)]
        for path in paths:
            assert len(path.tag_ids) == length
            assert path.log_prob == pytest.approx(joint_log_prob(lattice, path.tag_ids), rel=1e-12)
            assert path.log_prob <= paths[tags - 1].log_prob
            narrower += path.log_prob < paths[tags - 1].log_prob
        assert paths[tags].tag_ids.tolist() == paths[tags - 1].tag_ids.tolist()
    assert narrower > 5  # the law is put to the test


def test_the_lower_of_equally_probable_tags_is_taken():
    level = Lattice(np.zeros(3), np.zeros((3, 3)), np.zeros((4, 3)))
    assert all(beam_search(level, width).tag_ids.tolist() == [0, 0, 0, 0] for width in (1, 2, 3))
    zigzag = Lattice(np.array([-1.0, 0.0]), np.array([[0.0, -9.0], [-1.0, -9.0]]), np.zeros((2, 2)))
    assert beam_search(zigzag, 2).tag_ids.tolist() == [0, 0]


def test_smoothing_makes_every_pair_of_tags_possible():
    smooth = replace(MODEL, config=HMMConfig(smoothing=0.5))
    count = len(MODEL.tags)
    assert smooth.transitions[STATE["DT"], STATE["IN"]] == pytest.approx(0.5 / (4 + 0.5 * count))
    assert smooth.initial.sum() == pytest.approx(1)
    backwards = ["mat", "the", "on"]
    assert tag_words(smooth, backwards, count) == ["NN", "DT", "IN"]
    with pytest.raises(SettingError, match="smoothing above 0"):
        tag_words(MODEL, backwards, count)


VERBS = ("walked talked jumped opened closed worked looked played called moved").split()
NOUNS = ("goodness darkness kindness weakness illness sadness thickness boldness fitness business").split()
NAMES = ("Anna Berta Carla Dora Emma Frida Greta Hanna Ida Jana").split()
ENDINGS = estimate_tagger(
    [
        [(name, "PROPN"), (verb, "VERB"), ("the", "DET"), (noun, "NOUN")]
        for name, verb, noun in zip(NAMES, VERBS, NOUNS, strict=True)
    ],
    HMMConfig(smoothing=0.1),
)


def test_an_unknown_word_is_told_by_its_ending_and_its_capital():
    best = {
        word: ENDINGS.tags[ENDINGS.emissions([word])[0].argmax()]
        for word in ("painted", "coldness", "Klara", "Zzz")
    }
    assert best == {"painted": "VERB", "coldness": "NOUN", "Klara": "PROPN", "Zzz": "PROPN"}
    assert tag_words(ENDINGS, ["Klara", "painted", "the", "coldness"], 4) == ["PROPN", "VERB", "DET", "NOUN"]
    assert (ENDINGS.emissions(["zzz"]) > 0).all()


BIO = [
    read("Ada/B-PER Lovelace/I-PER met/O George/B-PER in/O New/B-LOC York/I-LOC City/I-LOC"),
    read("they/O met/O Charles/B-PER Babbage/I-PER"),
    read("Paris/B-LOC"),
]


def test_a_path_of_bio_labels_never_continues_an_entity_that_has_not_begun():
    model, rng = estimate_tagger(BIO, HMMConfig(smoothing=0.1)), np.random.default_rng(0)
    for _ in range(60):
        words = rng.choice([*model.words, "Unseen", "unseen"], 5).tolist()
        for width in (1, 2, len(model.tags)):
            tags = ["O", *tag_words(model, words, width)]
            for before, tag in itertools.pairwise(tags):
                assert not tag.startswith("I-") or before[1:] == tag[1:]
    assert model.initial.sum() == pytest.approx(1)


def test_labels_that_break_bio_in_training_may_break_it_in_answers():
    model = estimate_tagger([*BIO, read("Lovelace/I-PER met/O")], HMMConfig(smoothing=0.1))
    assert tag_words(model, ["Lovelace", "met"], len(model.tags)) == ["I-PER", "O"]


def test_an_unknown_word_s_probabilities_are_the_mean_of_ever_longer_endings_over_those_of_the_tags():
    config = HMMConfig(suffix=1, shorter=0.25)
    model = estimate_tagger([[("ab", "X"), ("cb", "Y"), ("db", "Y"), ("e", "Y"), ("e", "Y")]], config)
    all_tags = np.array([1 / 5, 4 / 5])
    rare = (np.array([1 / 3, 2 / 3]) + 0.25 * all_tags) / 1.25  # ab, cb and db
    ending = (np.array([1 / 3, 2 / 3]) + 0.25 * rare) / 1.25
    assert model.emissions(["xyb"])[0] == pytest.approx(ending / [1, 4])
    assert model.emissions(["xyz"])[0] == pytest.approx(rare / [1, 4])


def test_frequent_words_do_not_say_how_unknown_ones_are_tagged():
    text = [[("of", "IN")] * 9 + [("scarf", "NN"), ("surf", "NN")]]
    model = estimate_tagger(text, HMMConfig(smoothing=0.1))
    assert tag_words(model, ["turf"], 2) == ["NN"]


def test_the_baseline_gives_a_word_its_most_frequent_tag_and_an_unknown_one_that_of_all_words():
    text = [read("Zoo/NN can/MD can/MD can/NN fish/NN fish/VB fish/VB the/DT a/DT an/DT this/DT")]
    model = estimate_tagger(text, HMMConfig())
    assert model.most_frequent_tags(["can", "fish", "the", "unknown"]) == ["MD", "VB", "DT", "DT"]


def test_viterbi_tags_better_than_greedy_and_greedy_better_than_the_baseline():
    rng, tags = np.random.default_rng(0), 6
    moves, emits = rng.dirichlet(np.full(tags, 0.25), tags), rng.dirichlet(np.full(12, 0.5), tags)

    def sentence():
        state, pairs = 0, []
        for _ in range(12):
            state = rng.choice(tags, p=moves[state])
            pairs.append((f"w{rng.choice(12, p=emits[state])}", f"t{state}"))
        return pairs

    model = estimate_tagger([sentence() for _ in range(400)], HMMConfig(smoothing=0.1))
    held_out = [sentence() for _ in range(150)]
    gold, texts = [tags_of(s) for s in held_out], [words_of(s) for s in held_out]
    answers = (
        [model.most_frequent_tags(t) for t in texts],
        *([tag_words(model, t, w) for t in texts] for w in (1, tags)),
    )
    baseline, greedy, viterbi = (token_accuracy(gold, answer) for answer in answers)
    assert baseline + 2 < greedy < viterbi - 1


def test_a_saved_tagger_is_read_back_as_it_was(tmp_path):
    save_tagger(ENDINGS, tmp_path / "tagger.npz")
    back = load_tagger(tmp_path / "tagger.npz")
    assert (back.config, back.tags, back.words) == (ENDINGS.config, ENDINGS.tags, ENDINGS.words)
    for found, wanted in zip(
        back.lattice(["Anna", "unseen"]), ENDINGS.lattice(["Anna", "unseen"]), strict=True
    ):
        assert (found == wanted).all()


def test_a_damaged_file_and_one_of_another_model_are_refused(tmp_path):
    path = tmp_path / "tagger.npz"
    save_tagger(MODEL, path)
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(DataError, match="tagger.npz is damaged"):
        load_tagger(path)


def test_what_cannot_be_estimated_or_tagged_is_refused():
    with pytest.raises(SettingError, match="one tagged sentence"):
        estimate_tagger([[]], HMMConfig())
    with pytest.raises(SettingError, match="smoothing=-1"):
        HMMConfig(smoothing=-1)
    with pytest.raises(SettingError, match="width=0 of a beam"):
        tag_words(MODEL, ["The"], 0)
    assert tag_words(MODEL, [], 1) == []
