"""The unigram plateau: the loss of a model that has learned word frequencies and nothing of the context."""

from experiments.study.experiment import Experiment

PLATEAU_MARGIN = 0.2  # below the unigram loss: a model has left the plateau [nats per content token]
# Up to so many passes over a text teach nearly as much as new text of that length (Muennighoff et al. 2023).
MAX_PASSES = 4


def has_plateau(experiment: Experiment) -> bool:
    """Return whether held-out loss shows if pre-training has learned more than unigram frequencies.

    It does not for a row that trains on tasks beside the corpus, that reads a text more often than
    MAX_PASSES and so memorizes it, or that copies.
    """
    copies = all(
        not denoiser.objective.corruption.hides_tokens and denoiser.objective.sentences == "in-order"
        for denoiser in experiment.objective.denoisers
    )
    memorizes = experiment.data.repeats > MAX_PASSES
    return experiment.mixing.pretraining == "corpus" and not memorizes and not copies


def plateau_note(plateau_exit_step: int | None, experiment: Experiment) -> str:
    """Return a note on when a run left the unigram plateau, to append to its losses; "" if it has none.

    A run that starts from a trained model leaves none: it is beyond the plateau when it is first evaluated.
    """
    if not has_plateau(experiment):
        return ""
    if plateau_exit_step is None:
        return "; it has not left the unigram plateau"
    if experiment.start.model and experiment.start.weights == "trained":
        return ""
    return f"; it left the unigram plateau at step {plateau_exit_step:,}"
