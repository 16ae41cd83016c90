"""The feed-forward layer of a block, and the adapter that may follow it."""

import jax
from flax import nnx
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Bool, Float

from lm.config.model import ModelConfig
from lm.nn.dropout import dropout
from lm.nn.layers import ACTIVATIONS, Identity, Linear, Module, ScalarBias, make_norm, remat
from lm.sharding import constrain


class MLP(Module):
    """The feed-forward layer, [B,T,D] to [B,T,D] through F hidden features.

    A gated layer multiplies these by a second, linear projection (GLU, Shazeer 2020).
    """

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        self.config = config

        def linear(shape: tuple[int, int], axes: tuple[str, str]) -> Linear:
            return Linear(rngs, shape, axes, std=shape[0] ** -0.5, use_bias=config.mlp_has_bias)

        inward, is_gated = (config.d_model, config.mlp.d_ff), config.mlp.activation.startswith("gated")
        self.hidden = linear(inward, ("embed", "mlp"))
        self.linear = linear(inward, ("embed", "mlp")) if is_gated else None
        self.hidden_bias = ScalarBias() if config.residual == "fixup" else Identity()
        self.out = linear((config.mlp.d_ff, config.d_model), ("mlp", "embed"))

    def __call__(
        self, x: Float[Array, "B T D"], dropout_mask: Bool[Array, "B 1 F"] | None
    ) -> Float[Array, "B T D"]:
        """Return [B,T,D] of x [B,T,D]; ``dropout_mask`` bool [B,1,F]."""
        hidden = checkpoint_name(constrain(self.hidden(x), "batch", "length", "mlp"), "mlp_hidden")
        linear = None
        if self.linear is not None:
            linear = checkpoint_name(constrain(self.linear(x), "batch", "length", "mlp"), "mlp_hidden")
        return checkpoint_name(self._activate_and_project(hidden, linear, dropout_mask), "mlp_out")

    @remat  # computed again in the backward pass, but for the last product, which no gradient needs
    def _activate_and_project(self, hidden: Array, linear: Array | None, dropout_mask: Array | None) -> Array:
        hidden = ACTIVATIONS[self.config.mlp.activation](hidden)
        if linear is not None:
            hidden = hidden * linear
        return self.out(self.hidden_bias(dropout(hidden, dropout_mask, self.config.dropout)))


class Adapter(Module):
    """A bottleneck [B,T,D] to [B,T,D] after a block, trained alone (Houlsby et al. 2019).

    It begins with a norm, also in post-norm models. A new adapter adds next to nothing: adapters train alike
    from any standard deviation of ``out`` up to 1e-2. It is not 0, since Adafactor's step is relative to a
    parameter's size.
    """

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        self.config = config
        width, inner, use_bias = config.d_model, config.mlp.adapter_width, config.bias
        self.norm = make_norm(config.norm, width)
        self.hidden = Linear(rngs, (width, inner), ("embed", "adapter"), std=width**-0.5, use_bias=use_bias)
        self.out = Linear(rngs, (inner, width), ("adapter", "embed"), std=1e-2, use_bias=use_bias)

    def __call__(
        self, x: Float[Array, "B T D"], dropout_mask: Bool[Array, "B 1 adapter_width"] | None
    ) -> Float[Array, "B T D"]:
        """Return [B,T,D] of x [B,T,D]; ``dropout_mask`` bool [B,1,adapter_width]."""
        hidden = jax.nn.relu(self.hidden(self.norm(x)))
        return self.out(dropout(hidden, dropout_mask, self.config.dropout))
