"""Laws of scoring a model on a task."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from lm.data.classification import Reader, labelled_eval_batches
from lm.data.tasks.labelled import LABELLED
from lm.data.tasks.task import LabelledTask
from lm.evaluate.evaluator import EvalTask, score_task
from lm.tokenizers.sentencepiece import ByteTokenizer

ROWS = [{"sentence1": f"first {i}", "sentence2": "second", "label": int(i > 2)} for i in range(5)]


def scored(name, rows):
    """Scores a head that answers class 0 to each row of a task, in batches of three."""
    reader = Reader(LABELLED[name], ByteTokenizer(100), "encoder", 100)
    place = partial(jax.device_put, device=NamedSharding(jax.make_mesh((1,), ("data",)), PartitionSpec()))
    batches = labelled_eval_batches(reader, rows, 3)
    logits = jnp.tile(jnp.array([1.0, 0.0]), (3, 1))
    task = EvalTask(reader.task, rows, batches, lambda model, batch: logits, reader.answer)
    return score_task(None, task, place, None)


def test_a_head_keeps_the_score_of_each_row_of_which_its_score_is_the_mean():
    found = scored("follows", ROWS)
    np.testing.assert_array_equal(found.example_values()["score"], [100, 100, 100, 0, 0])
    assert found.metrics == {"accuracy": 60, "score": 60}


def test_rows_are_scored_one_by_one_only_if_their_scores_are_asked_for(monkeypatch):
    calls = []
    monkeypatch.setattr(LabelledTask, "example_scores", lambda *_: calls.append(_))
    found = scored("follows", ROWS)
    assert not calls
    assert not found.example_values() and len(calls) == 1


def test_a_correlation_has_no_score_of_a_single_row():
    found = scored("cola", [{"sentence": f"{i}", "label": i % 2} for i in range(5)])
    assert found.metrics["score"] == 0 and not found.example_values()
