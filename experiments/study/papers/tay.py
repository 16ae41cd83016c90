"""The shapes of Tay et al. 2021 ("Scale efficiently"): a line for each of 42 released checkpoints.

T5 models whose names say how they differ from a size: nl layers, el and dl of encoder and decoder, ff
feed-forward width, dm width, kv width of a head, nh heads. The scores of the paper were not readable; those
of the model cards are parameters. Choices made where the paper is silent: docs/choices.md.
"""

from dataclasses import dataclass
from pathlib import Path

from experiments.study.changes import Changes, objective, times
from experiments.study.papers.setups import NOT_TUNED
from experiments.study.table import Missing, Paper, PublishedScores, make_setup, make_table, missing

_SCORES = PublishedScores(Path(__file__).with_name("tay_scores.json"))
PAPER = Paper(
    name="T5 shapes",
    citation="Tay et al. 2021",
    authors=(
        "Yi Tay, Mostafa Dehghani, Jinfeng Rao, William Fedus, Samira Abnar, Hyung Won Chung, "
        "Sharan Narang, Dani Yogatama, Ashish Vaswani, Donald Metzler"
    ),
    title="Scale Efficiently: Insights from Pre-training and Fine-tuning Transformers",
    columns=_SCORES.columns,
    question="Which shape of a T5 model is best at equal parameters or operations?",
    source="arXiv 2109.10686",
    setup=make_setup(
        objective("span-corruption") | NOT_TUNED, {"tuning.mixtures": ("glue", "super_glue", "squad")}
    ),
)


@dataclass(frozen=True)
class Shape:
    """The sizes of a T5 model; the defaults are those of the base size."""

    el: int = 12  # encoder layers
    dl: int = 12  # decoder layers
    ff: int = 3_072
    dm: int = 768
    kv: int = 64
    nh: int = 12

    @property
    def changes(self) -> Changes:
        """Return the shape as shares of the base size, without what does not differ."""
        base = Shape()
        changes: Changes = {}
        if self.el != base.el:
            changes["model.num_encoder_layers"] = times(self.el / base.el)
        if self.dl != base.dl:
            changes["model.num_decoder_layers"] = times(self.dl / base.dl)
        if self.ff != base.ff:
            changes["model.mlp.d_ff"] = times(self.ff / base.ff, 8)
        if self.dm != base.dm:
            changes["model.d_model"] = times(self.dm / base.dm, 8)
        if self.kv != base.kv:
            changes["model.attention.d_kv"] = times(self.kv / base.kv)
        if self.nh != base.nh:
            changes["model.attention.num_heads"] = times(self.nh / base.nh)
        return changes


def tiny(layers: int = 4, nh: int = 4) -> Changes:
    """Return the tiny size, of 4 + 4 layers unless said otherwise."""
    return Shape(layers, layers, 1_024, 256, nh=nh).changes


def mini(layers: int = 4) -> Changes:
    """Return the mini size, of 4 + 4 layers unless said otherwise."""
    return Shape(layers, layers, 1_536, 384, nh=8).changes


def small(el: int = 6, dl: int = 6, ff: int = 2_048, dm: int = 512, kv: int = 64) -> Changes:
    """Return the small size, of 6 + 6 layers unless said otherwise."""
    return Shape(el, dl, ff, dm, kv, 8).changes


def large(el: int = 24, dl: int = 24) -> Changes:
    """Return the large size, of 24 + 24 layers unless said otherwise."""
    return Shape(el, dl, 4_096, 1_024, nh=16).changes


ROWS: dict[str, Changes | Missing] = {
    "tiny": tiny(),
    "mini": mini(),
    "small": small(),
    "base": {},
    "large": large(),
    "xl": Shape(24, 24, 16_384, 1_024, 128, 32).changes,
    "xxl": Shape(24, 24, 65_536, 1_024, 128, 128).changes,
    "tiny-nl6": tiny(6),
    "tiny-nl16": tiny(16),
    "tiny-nl32": tiny(32),
    "tiny-nh16": tiny(nh=16),
    "tiny-el12": tiny(12),  # of the decoder too, in its config.json
    "mini-nl6": mini(6),
    "mini-nl12": mini(12),
    "mini-nl24": mini(24),
    "small-nl22": small(22, 22),
    "small-nl32": small(32, 32),
    "small-nl36": small(36, 36),
    "small-el16": small(16),
    "small-el16-dl4": small(16, 4),
    "small-el32": small(32),
    "small-kv32": small(kv=32),
    "small-kv128": small(kv=128),
    "small-dm1000": small(dm=1_024),
    "small-ff6000": small(ff=6_144),
    "base-nl2": Shape(2, 2).changes,
    "base-nl4": Shape(4, 4).changes,
    "base-nl8": Shape(8, 8).changes,
    "base-nl24": Shape(24, 24).changes,
    "base-nl36": Shape(36, 36).changes,
    "base-nl40": Shape(40, 40).changes,
    "base-dl2": Shape(dl=2).changes,
    "base-kv16": Shape(kv=16).changes,
    "base-kv32": Shape(kv=32).changes,
    "base-nh24": Shape(nh=24).changes,
    "base-dm512": Shape(dm=512).changes,
    "base-ff2000": Shape(ff=2_048).changes,
    "large-nl2": large(2, 2),
    "large-nl20": large(20, 20),
    "large-nl36": large(36, 36),
    "large-el2": large(el=2),
    "xxl-nl4": missing("its config.json"),
}

TABLES = (
    # lm sweep tay/released-shapes --scale small; with two or four layers some shapes are equal, and share a
    # run
    make_table(
        "tay/released-shapes",
        "Shapes of T5 models",
        ROWS,
        baseline="base",
        scale="mini",
        seeds=3,
        paper=PAPER,
        columns=[],
        published=_SCORES,
    ),
)
