"""A mixture of experts in place of a block's feed-forward layer.

Shapes: B rows, T positions, G groups of rows that share the experts' capacity, S tokens of a group, E
experts, C slots of an expert, D = d_model, F = d_ff.
"""

from math import gcd
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Bool, Float, Float32, Int

from lm.config.model import ModelConfig
from lm.nn.dropout import dropout, split_key
from lm.nn.layers import ACTIVATIONS, Linear, Module, normal, num_parameters, param, remat
from lm.ops import experts as ops
from lm.sharding import constrain


class RouterStatistics(NamedTuple):
    """Holds the sums over layers, for each row, from which losses and logs of routers are computed.

    A row has the values of its group (``experts.group_rows``).
    """

    balance_loss: Float32[Array, " B"]
    z_loss: Float32[Array, " B"]
    dropped: Float32[Array, " B"]  # share of choices without a slot; in expert choice, of tokens not chosen

    @classmethod
    def zeros(cls, rows: int) -> "RouterStatistics":
        """Return the statistics of a layer without experts."""
        return cls(*(jnp.zeros(rows, jnp.float32) for _ in cls._fields))


class Choices(NamedTuple):
    """Holds what a router chose."""

    probabilities: Float32[Array, "G S E"]
    experts: Int[Array, "G S k"]
    weights: Float32[Array, "G S k"]  # of the outputs of these experts


class ExpertLinear(Module):
    """A linear layer for each expert: x [G,E,C,in] times kernels [E,in,out], plus biases if it has them."""

    def __init__(self, rngs: nnx.Rngs, shape: tuple[int, int, int], axes: tuple[str, str], *, use_bias: bool):
        num_experts, width, out = shape
        self.kernel = param(normal(rngs, shape, width**-0.5), "experts", *axes)
        bias = None
        if use_bias:
            bias = param(jnp.zeros((num_experts, out), jnp.float32), "experts", axes[1])
        self.bias = bias

    def __call__(self, x: Float[Array, "G E C in"]) -> Float[Array, "G E C out"]:
        y = jnp.einsum("geci,eio->geco", x, self.kernel[...].astype(x.dtype))
        if self.bias is not None:
            y = y + self.bias[...].astype(y.dtype)[None, :, None, :]
        return y


class ExpertMLP(Module):
    """Feed-forward layers; a router sends each token through a few of them (Fedus et al. 2021).

    With a capacity each expert computes its slots, and drops the tokens for which it has none. Without one
    every expert processes every token, one expert after another, and most outputs get weight 0. The same
    holds with ``eval_capacity``, whose limit is per text: the number of slots that a row needs is not known
    when the program is compiled.
    """

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        self.config = config
        num_experts, d_model, d_ff = config.experts.count, config.d_model, config.expert_d_ff

        def linear(width: int, out: int, axes: tuple[str, str]) -> ExpertLinear:
            return ExpertLinear(rngs, (num_experts, width, out), axes, use_bias=config.mlp_has_bias)

        router_axes = "embed", "classes"
        self.router = Linear(rngs, (d_model, num_experts), router_axes, std=d_model**-0.5, use_bias=False)
        self.hidden = linear(d_model, d_ff, ("embed", "mlp"))  # T5's wi or, of a gated layer, wi_0
        is_gated = config.mlp.activation.startswith("gated")
        self.linear = linear(d_model, d_ff, ("embed", "mlp")) if is_gated else None  # T5's wi_1
        self.out = linear(d_ff, d_model, ("mlp", "embed"))

    def __call__(
        self,
        x: Float[Array, "B T D"],
        segments: Int[Array | np.ndarray, "B T"] | None,
        dropout_mask: Bool[Array, "B 1 F"] | None,
        key: Array | None,
        keeps_all: bool,
    ) -> tuple[Float[Array, "B T D"], RouterStatistics]:
        """Return [B,T,D] of x [B,T,D], and the router's statistics.

        ``segments`` are 0 at padding, which goes to no expert. ``key`` decides what a router explores in
        training. ``keeps_all``, in decoding: no expert drops a token.
        """
        config = self.config.experts
        rows, length, _ = x.shape
        is_training = key is not None
        text_capacity, group_rows = None, gcd(config.group_rows, rows)
        if config.eval_capacity is not None and not (is_training or keeps_all):
            text_capacity, group_rows = config.eval_capacity, 1
        explore_key, dropout_key = split_key(key, 2)
        if config.dropout is not None or config.d_ff is not None:
            dropout_mask = self._own_dropout_mask(dropout_key, rows)
        is_token = jnp.ones((rows, length), bool) if segments is None else jnp.asarray(segments) > 0
        grouped = x.reshape(rows // group_rows, group_rows * length, -1)
        is_token = is_token.reshape(grouped.shape[:2])
        logits = self._router_logits(grouped, explore_key)
        capacity, factor = grouped.shape[1], config.factor(is_training)
        if factor is not None and not keeps_all:
            capacity = ops.expert_capacity(capacity, config.count, factor)
        if config.kind == "expert-choice":
            out, statistics = self._by_expert_choice(grouped, logits, is_token, dropout_mask, capacity)
        else:
            choices = self._choose(logits, explore_key)
            is_kept = None
            if text_capacity is not None:
                texts = None if segments is None else jnp.asarray(segments)
                is_kept = ops.is_within_capacity(choices.experts, texts, config.count, text_capacity)
            out, statistics = self._by_token_choice(
                grouped, logits, choices, is_token, is_kept, dropout_mask, capacity
            )
        by_row = RouterStatistics(*(jnp.repeat(each, group_rows) for each in statistics))
        out = constrain(out.reshape(x.shape), "batch", "length", "embed")
        return checkpoint_name(out, "mlp_out"), by_row

    def flops(self, length: int) -> float:
        """Return the FLOPs of the router and of the experts that ``length`` tokens are routed to.

        Empty slots are not counted, nor what experts without a capacity compute for tokens of others.
        """
        router = 2 * length * self.router.kernel.size
        return router + 2 * length * self.active_share * self._matrix_elements

    @property
    def active_share(self) -> float:
        """Return which share of the experts a token passes; of expert choice, the mean."""
        config = self.config.experts
        chosen: float = config.per_token
        if config.kind == "expert-choice":
            chosen = min(config.capacity_factor, config.count)
        return chosen / config.count

    @property
    def inactive_parameters(self) -> float:
        """Return the number of parameters of a layer that a token does not pass."""
        return (1 - self.active_share) * (num_parameters(self) - self.router.kernel.size)

    @property
    def _dropout_rate(self) -> float:
        own = self.config.experts.dropout
        return self.config.dropout if own is None else own

    @property
    def _matrix_elements(self) -> int:
        layers = [layer for layer in (self.hidden, self.linear, self.out) if layer is not None]
        return sum(layer.kernel.size for layer in layers)

    def _router_logits(self, x: Array, key: Array | None) -> Array:
        """Return the logits float32 [G,S,E], whatever the type of the model's activations."""
        config, x = self.config.experts, x.astype(jnp.float32)
        if key is not None and config.exploration == "jitter":
            x = x * jax.random.uniform(key, x.shape, minval=1 - config.noise, maxval=1 + config.noise)
        if key is not None and config.exploration == "dropout":
            x = dropout(x, jax.random.bernoulli(key, 1 - config.noise, x.shape), config.noise)
        return self.router(x)

    def _choose(self, logits: Array, key: Array | None) -> Choices:
        """Return the experts of each token by the router's logits [G,S,E]; ``key`` draws some in training."""
        config = self.config.experts
        probabilities = jax.nn.softmax(logits, axis=-1)
        scores = probabilities
        if key is not None and config.exploration == "sample":
            # the largest of the logits plus Gumbel noise is a draw from their softmax
            scores = logits + jax.random.gumbel(key, logits.shape)
        experts, weights = ops.choose_experts(scores, probabilities, config.per_token, config.normalized)
        return Choices(probabilities, experts, weights)

    def _by_token_choice(
        self,
        x: Array,
        logits: Array,
        choices: Choices,
        is_token: Array,
        is_kept: Array | None,
        dropout_mask: Array | None,
        capacity: int,
    ) -> tuple[Array, RouterStatistics]:
        """Return the outputs [G,S,D] where tokens choose experts, and the statistics [G].

        ``is_kept`` bool [G,S,k]: which choices are processed in evaluation; None: all that have a slot.
        """
        config, (probabilities, experts, weights) = self.config.experts, choices
        num_choices = jnp.maximum(is_token.sum(1) * config.per_token, 1)
        dropped = jnp.zeros(len(x), jnp.float32)
        if capacity >= x.shape[1]:
            weights = weights * is_token[:, :, None]
            if is_kept is not None:
                weights = jnp.where(is_kept, weights, 0)
                dropped = (~is_kept & is_token[:, :, None]).sum((1, 2)) / num_choices
            out = self._mix_all(x, ops.dense_weights(experts, weights, config.count), dropout_mask)
        else:
            routes = ops.assign_slots(experts, is_token, config.count, capacity)
            out = ops.combine(self._experts(ops.dispatch(x, routes), dropout_mask), weights, routes)
            dropped = ops.count_dropped(routes.slot, is_token, config.count * capacity) / num_choices
        balance = ops.load_balancing_loss(probabilities, experts, is_token)
        return out, RouterStatistics(balance, ops.router_z_loss(logits, is_token), dropped)

    def _by_expert_choice(
        self, x: Array, logits: Array, is_token: Array, dropout_mask: Array | None, capacity: int
    ) -> tuple[Array, RouterStatistics]:
        """Return the outputs [G,S,D] where experts choose tokens, and the statistics [G].

        The load is balanced by construction, so the balance loss is 1. A token that no expert chose counts as
        dropped.
        """
        probabilities = jax.nn.softmax(logits, axis=-1)
        routes = ops.choose_tokens(probabilities, is_token, capacity)
        out = ops.combine(self._experts(ops.dispatch(x, routes), dropout_mask), probabilities, routes)
        is_unrouted = (routes.slot >= self.config.experts.count * capacity).all(-1) & is_token
        dropped = is_unrouted.sum(1) / jnp.maximum(is_token.sum(1), 1)
        balance = jnp.ones(len(x), jnp.float32)
        return out, RouterStatistics(balance, ops.router_z_loss(logits, is_token), dropped)

    def _experts(self, slots: Array, dropout_mask: Array | None) -> Array:
        """Return the output of each expert for its own slots, [G,E,C,D]."""
        # Devices exchange tokens: each has all slots of its own rows, and then those of its own experts, of
        # more rows. Both are named, so that gradients are exchanged at the same place.
        of_rows = "batch", "slots", "slots", "embed"
        axes = "batch_of_experts", "experts", "slots"
        slots = constrain(constrain(slots, *of_rows), *axes, "embed")
        hidden = checkpoint_name(constrain(self.hidden(slots), *axes, "mlp"), "mlp_hidden")
        linear = None
        if self.linear is not None:
            linear = checkpoint_name(constrain(self.linear(slots), *axes, "mlp"), "mlp_hidden")
        out = constrain(self._activate_and_project(hidden, linear, dropout_mask), *axes, "embed")
        return constrain(out, *of_rows)

    def _mix_all(self, x: Array, weights: Array, dropout_mask: Array | None) -> Array:
        """Return the sum [G,S,D] of the outputs of all experts for all tokens, by ``weights`` [G,S,E]."""

        @jax.checkpoint  # otherwise the hidden layers of all experts would be saved for the backward pass
        def add(total: Array, expert_and_weight: tuple["ExpertMLP", Array]) -> tuple[Array, None]:
            expert, weight = expert_and_weight
            slots = x[:, None]  # one expert, whose slots are all tokens
            linear = None if expert.linear is None else expert.linear(slots)
            out = expert._activate_and_project(expert.hidden(slots), linear, dropout_mask)[:, 0]
            return total + out * weight[:, :, None].astype(out.dtype), None

        # One module for each expert: [E,...] becomes [E,1,...].
        apart = jax.tree.map(lambda leaf: leaf[:, None], self.without_router())
        return jax.lax.scan(add, jnp.zeros_like(x), (apart, jnp.moveaxis(weights, -1, 0)))[0]

    def without_router(self) -> "ExpertMLP":
        """Return the experts alone, whose parameters all begin with the axis of experts."""
        experts = jax.tree.map(lambda leaf: leaf, self)  # a copy
        experts.router = None
        return experts

    @remat  # recomputed in the backward pass, except the last product, whose value no gradient needs
    def _activate_and_project(self, hidden: Array, linear: Array | None, dropout_mask: Array | None) -> Array:
        hidden = ACTIVATIONS[self.config.mlp.activation](hidden)
        if linear is not None:
            hidden = hidden * linear
        if dropout_mask is not None:
            # All tokens of a group drop the same features: those of its first row.
            rows_per_group = len(dropout_mask) // len(hidden)
            dropout_mask = dropout_mask[::rows_per_group, :, None, :]
        return self.out(dropout(hidden, dropout_mask, self._dropout_rate))

    def _own_dropout_mask(self, key: Array | None, rows: int) -> Array | None:
        """Return the mask bool [B,1,F] by the rate and the width of experts; None without a key."""
        if key is None:
            return None
        shape = rows, 1, self.config.expert_d_ff
        return constrain(jax.random.bernoulli(key, 1 - self._dropout_rate, shape), "batch", "length", "mlp")
