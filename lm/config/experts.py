"""Settings of mixtures of experts, which take the place of feed-forward layers.

Sources: Fedus et al. 2021 (Switch Transformers), Lepikhin et al. 2021 (GShard: two experts per token), Zhou
et al. 2022 (expert choice), Zoph et al. 2022 (ST-MoE: the router's z-loss).
"""

from dataclasses import dataclass
from typing import Literal

from lm.config.base import (
    ABOVE_0,
    GIVEN,
    Condition,
    SettingError,
    Values,
    check_at_least,
    check_at_least_0_below_1,
    check_at_most,
    setting,
)

ROUTED: Condition = {"count": ABOVE_0}
TOKENS_CHOOSE: Condition = ROUTED | {"kind": ("token-choice",)}
SEVERAL: Condition = TOKENS_CHOOSE | {"per_token": Values(above=1)}


@dataclass(frozen=True)
class ExpertsConfig:
    """Mixtures of experts: a router sends each token through a few of a layer's feed-forward layers."""

    count: int = 0  # number of experts of a layer; 0: it has one feed-forward layer [experts]
    # width of an expert's hidden layer; None: as mlp.d_ff (Narang et al. 2021: half of it) [features]
    d_ff: int | None = setting(None, ROUTED)
    # who chooses: each token its experts (token-choice), or each expert its tokens among all of a row
    # (expert-choice, Zhou et al. 2022: of encoders, since it looks ahead)
    kind: Literal["token-choice", "expert-choice"] = setting("token-choice", ROUTED)
    # number of experts that a token goes to: 1 as in Switch, or 2 as in GShard and Mixtral [experts]
    per_token: int = setting(1, TOKENS_CHOOSE)
    # whether the weights of a token's experts are divided by their sum (GShard, Mixtral), or are the
    # probabilities of the router
    normalized: bool = setting(True, SEVERAL)
    # layers with experts: every n-th, the others have a feed-forward layer; 2 in Switch [layers]
    every: int = setting(1, ROUTED)
    # index of the first layer with experts; None: every - 1, so that the last layer of each n has them
    first: int | None = setting(None, ROUTED | {"every": Values(above=1)})
    # capacity in training: an expert reads at most so many times its even share of a group's tokens, and
    # drops the others, which pass the layer unchanged; None: nothing is dropped, and every expert computes
    # every token
    capacity_factor: float | None = setting(1.25, ROUTED)
    # capacity in evaluation; None: nothing is dropped. Decoding never drops a token.
    eval_capacity_factor: float | None = setting(None, ROUTED | {"capacity_factor": GIVEN})
    # capacity in evaluation as a number: an expert reads the first tokens of each text that choose it, up to
    # this many, however long the text is (published weights of Switch: 64); None: by the factor [tokens]
    eval_capacity: int | None = setting(None, TOKENS_CHOOSE)
    # number of rows of a batch whose tokens share the capacity of the experts; the largest number that
    # divides both it and the batch is used [sequences]
    group_rows: int = setting(1, ROUTED | {"capacity_factor": GIVEN})
    # weight of the load-balancing loss of each layer, which is 1 if tokens are spread evenly (Switch: 0.01)
    balance_loss: float = setting(0.01, TOKENS_CHOOSE)
    # weight of the router's z-loss of each layer, its squared log-sum-exp (ST-MoE: 0.001)
    z_loss: float = setting(0.0, ROUTED)
    # how the router tries other experts in training: it draws one (sample), or its inputs are multiplied by
    # noise (jitter) or dropped at random (dropout) (Switch, Table 11)
    exploration: Literal["none", "jitter", "dropout", "sample"] = setting("none", TOKENS_CHOOSE)
    # largest part by which jitter changes an input, or the rate of the router's own dropout
    noise: float = setting(0.01, TOKENS_CHOOSE | {"exploration": ("jitter", "dropout")})
    # dropout rate of the hidden layers of experts; None: as model.dropout (Switch, Table 4: 0.4)
    dropout: float | None = setting(None, ROUTED)

    def __post_init__(self):
        prefix = "model.experts."
        check_at_least(self, prefix, count=0, per_token=1, every=1, group_rows=1, balance_loss=0, z_loss=0)
        check_at_least(self, prefix, first=0, eval_capacity=1, d_ff=1)
        check_at_most(self, prefix, count=2**16)
        check_at_least_0_below_1(self, prefix, "noise" if self.dropout is None else "noise dropout")
        for name in ("capacity_factor", "eval_capacity_factor"):
            factor = getattr(self, name)
            if factor is not None and not 0 < factor < 2**20:
                raise SettingError(f"{prefix}{name}={factor} should be above 0, such as 1.25")
        if self.eval_capacity is not None and self.eval_capacity_factor is not None:
            raise SettingError(
                f"{prefix}eval_capacity={self.eval_capacity} and {prefix}eval_capacity_factor="
                f"{self.eval_capacity_factor} both limit what an expert reads in evaluation: one of the two "
                "should be None"
            )
        if not self.count:
            return
        if self.kind == "token-choice" and self.per_token > self.count:
            raise SettingError(
                f"{prefix}per_token={self.per_token} should be at most {prefix}count={self.count}"
            )
        if self.kind == "expert-choice" and self.capacity_factor is None:
            raise SettingError(
                f"{prefix}kind='expert-choice' needs a {prefix}capacity_factor: the mean number of experts "
                "that choose a token, such as 2"
            )

    def layers(self, num_layers: int) -> tuple[int, ...]:
        """Return which of a stack's layers have experts, counted from 0.

        >>> ExpertsConfig(count=4, every=2).layers(6)
        (1, 3, 5)
        >>> ExpertsConfig(count=4, every=3, first=1).layers(6)
        (1, 4)
        """
        return tuple(range(self.first_layer, num_layers, self.every)) if self.count else ()

    @property
    def first_layer(self) -> int:
        """Return the index of the first layer with experts."""
        return self.every - 1 if self.first is None else self.first

    def factor(self, is_training: bool) -> float | None:
        """Return the capacity factor in training or in evaluation; None: nothing is dropped."""
        if is_training:
            return self.capacity_factor
        if self.kind == "expert-choice" and self.eval_capacity_factor is None:
            return self.capacity_factor
        return self.eval_capacity_factor
