"""Adapters of golden/peer_cases.json: each takes a case's arguments by name, calls ours, and gives what
theirs gave.

Masked entries of masked arrays are not compared: there the two differ on purpose.
"""

import math
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from lm.batch import Batch, Side
from lm.c4 import filters
from lm.config.attention import RotaryConfig
from lm.config.layers import NormConfig
from lm.config.model import ModelConfig
from lm.config.training import OptimizerConfig
from lm.data.batches import uniforms
from lm.data.packing import (
    PaddedTexts,
    make_packed_batch,
    pack_examples,
    pad_texts,
    row_capacity,
    shift_right,
)
from lm.data.pretraining import noise_mask
from lm.data.tasks.benchmarks import TASKS, classification
from lm.nn.attention_inputs import make_attention_inputs
from lm.nn.layers import make_norm
from lm.objectives.corruption import CorruptionInputs
from lm.objectives.denoising import Lengths, Objective, compute_lengths
from lm.objectives.formatting import INPUTS, TARGETS
from lm.ops.attention import AttentionOptions
from lm.ops.kernels.xla import xla_attention
from lm.ops.losses import cross_entropy
from lm.ops.masks import AttentionMask, MaskSpec
from lm.ops.positions import rotate, sinusoids
from lm.train.optimizers import learning_rate, update_direction

# --- masks, positions, attention, losses
# -----------------------------------------------------------------------------


def attention_mask(query_input, key_input, **_):
    """Theirs treats 0 as a segment like the others."""
    query, key = jnp.array(query_input) + 1, jnp.array(key_input) + 1
    mask = AttentionMask({"segment": query}, {"segment": key}, MaskSpec())
    return mask.materialize(query.shape[1], key.shape[1])


def decoder_mask(decoder_target_tokens, decoder_segment_ids=None, decoder_causal_attention=None, **_):
    tokens = jnp.array(decoder_target_tokens)
    segments = tokens > 0 if decoder_segment_ids is None else jnp.array(decoder_segment_ids)
    prefix = None if decoder_causal_attention is None else jnp.array(decoder_causal_attention)
    side = Side(tokens=tokens, segment_ids=segments.astype(jnp.int32), causal_attention=prefix)
    config = ModelConfig("decoder" if prefix is None else "prefix-decoder")
    return make_attention_inputs(config, Batch(decoder=side), "decoder", None).mask


def attention(q, k, v, mask, bias, scale, **_):
    query, key, value = (jnp.array(x).swapaxes(1, 2) for x in (q, k, v))
    mask = None if mask is None else jnp.array(mask) > 0
    scale = query.shape[-1] ** -0.5 if scale == "head_dim**-0.5" else scale
    bias = None if bias is None else jnp.array(bias)
    return xla_attention(query, key, value, mask, bias, AttentionOptions(scale)).swapaxes(1, 2)


def rotary(q, k, positions, theta, **_):
    frequencies, factor = RotaryConfig(theta).frequencies(len(q[0][0][0]))
    places = jnp.array(positions)[None]
    inputs = (jnp.array(x).swapaxes(1, 2) for x in (q, k))
    turned = (rotate(x, places, frequencies, factor, "halves").swapaxes(1, 2) for x in inputs)
    return dict(zip("qk", turned, strict=True))


def sinusoid(layout, max_len, features, **_):
    return sinusoids(jnp.arange(max_len)[None], features, layout=layout)[0]


def weighted_loss(logits, targets, weights, z_loss, label_smoothing, **_):
    logits, targets, weights = map(jnp.array, (logits, targets, weights))
    loss = partial(cross_entropy, z_loss=z_loss, label_smoothing=label_smoothing)
    found = dict(zip(("loss", "weight_sum", "z_loss"), loss(logits, targets, weights), strict=True))
    return found | {"grad_logits": jax.grad(lambda logits: loss(logits, targets, weights)[0])(logits)}


def mean_loss(logits, labels, smoothing=0.0):
    labels = jnp.array(labels)

    def mean(logits):
        total, count, _ = cross_entropy(
            logits, labels.clip(0), labels >= 0, z_loss=0.0, label_smoothing=smoothing
        )
        return total / count

    return dict(zip(("loss", "grad"), jax.value_and_grad(mean)(jnp.array(logits)), strict=True))


def smoothed_loss(logits, labels, epsilon):
    """Theirs spreads epsilon over the right token too, and does not take off the entropy of the smoothed
    target.
    """
    wrong, count = epsilon / len(logits[0][0]), len(logits[0][0]) - 1
    right = 1 - count * wrong
    entropy = -right * math.log(right) - (count * wrong * math.log(wrong) if wrong else 0)
    return mean_loss(logits, labels, count * wrong)["loss"] + entropy


def norm(kind, x, eps, **weights):
    made = make_norm(NormConfig(kind=kind, epsilon=eps), len(x[0]))
    nnx.update(made, {name: jnp.array(value) for name, value in weights.items()})
    return made(jnp.array(x)[None])[0]


# --- optimisers
# ------------------------------------------------------------------------------------------------------


def descend(config, params, grads, state=None):
    """The parameters after each gradient, and the last state."""
    params, found = {"p": jnp.asarray(params, jnp.float32)}, []
    transform = update_direction(config, {"p": ("embed", "mlp")[: params["p"].ndim]})
    state = transform.init(params) if state is None else state(transform.init(params))
    for step, gradient in enumerate(grads):
        updates, state = transform.update({"p": jnp.asarray(gradient, jnp.float32)}, state, params)
        params = {"p": params["p"] - learning_rate(config, step) * updates["p"]}
        found.append(params["p"])
    return found, state


def adafactor(params, grads, learning_rate, decay_rate, factored, multiply_by_parameter_scale, **rest):
    config = OptimizerConfig(
        schedule="constant",
        learning_rate=learning_rate,
        decay_exponent=decay_rate,
        factor_from=1 if factored else 10**9,
        relative="parameter" if multiply_by_parameter_scale else "none",
        clip_rms=rest["clipping_threshold"],
        epsilon_square=rest["epsilon1"],
        epsilon_scale=rest["epsilon2"],
    )
    return descend(config, params, grads)[0]


def adafactor_step(params, grads, v_row, v_col, learning_rate, global_norm_clip_threshold=None, **_):
    """The second step, from the memory of a first."""
    config = OptimizerConfig(
        schedule="constant", learning_rate=learning_rate, factor_from=1, clip_norm=global_norm_clip_threshold
    )
    memory = {"v_row": jnp.asarray(v_row), "v_col": jnp.asarray(v_col), "count": jnp.asarray(1, jnp.int32)}

    def remembering(state):
        def filled(path, leaf):
            return memory.get(jax.tree_util.keystr(path).split(".")[-1].split("[")[0], leaf)

        return jax.tree_util.tree_map_with_path(filled, state)

    (found,), state = descend(config, params, [grads], remembering)
    return {"params": found} | {name: optax.tree.get(state, name)["p"] for name in ("v_row", "v_col")}


def adamw(params, grads, learning_rate, betas, weight_decay, eps):
    config = OptimizerConfig(
        "adamw",
        learning_rate,
        "constant",
        weight_decay=weight_decay,
        beta1=betas[0],
        beta2=betas[1],
        epsilon=eps,
    )
    # only matrices decay
    return [found[0] for found in descend(config, [params], [[grad] for grad in grads])[0]]


def schedule(name, steps, base_lr, num_warmup_steps, num_training_steps=0):
    config = OptimizerConfig(
        learning_rate=base_lr, schedule=name, warmup_steps=num_warmup_steps, decay_end=num_training_steps
    )
    past = np.array(steps) > (num_training_steps or math.inf)  # where the cosine of theirs rises again
    return np.ma.array(learning_rate(config, jnp.array(steps)), mask=past)


def t5x_schedule(steps, factors, base_learning_rate, warmup_steps):
    name = "inverse-sqrt" if "rsqrt" in factors else "constant"
    rate = base_learning_rate * (warmup_steps**0.5 if "normalized" in factors else 1)
    ramp = warmup_steps if "linear_warmup" in factors else 0
    config = OptimizerConfig(learning_rate=rate, schedule=name, timescale=warmup_steps, warmup_steps=ramp)
    return learning_rate(config, jnp.array(steps))


def clipped(grads, max_norm):
    """What AdamW, without a memory of gradients before, takes the gradients of several parameters for."""
    config = OptimizerConfig("adamw", clip_norm=max_norm, beta1=0.0)
    grads = {str(k): jnp.array(gradient) for k, gradient in enumerate(grads)}
    transform = update_direction(config, dict.fromkeys(grads, ("embed",)))
    taken = optax.tree.get(transform.update(grads, transform.init(grads), grads)[1], "mu")
    return {"norm": max_norm * grads["0"][0] / taken["0"][0], "clipped": [*taken.values()]}


# --- objectives and packing
# ------------------------------------------------------------------------------------------


def side(name, choice, tokens, noise_mask, vocabulary):
    """One side of an example under a mask that is given."""
    tokens, noise, size = np.array([tokens], np.int32), np.array([noise_mask], bool), vocabulary["vocab_size"]
    vocabulary = SimpleNamespace(vocab_size=size, num_sentinels=100, mask=size - 1, first_regular_id=3)
    view = {"inputs": INPUTS, "targets": TARGETS}[name][choice]
    shown, keep, _ = view.apply(Objective(), tokens, noise, np.zeros(tokens.shape, np.float32), vocabulary)
    return shown[keep].tolist()


def both_sides(objective, noise_mask, **given):
    styles = {"MASS": ("masks", "everything"), "span": ("sentinels",) * 2, "drop": ("drop",) * 2}
    if objective.startswith("prefix LM"):  # theirs marks the prefix as noise, ours the rest
        noise_mask, objective = [not noise for noise in noise_mask], "drop"
    shown, said = next(style for name, style in styles.items() if objective.startswith(name))
    given["noise_mask"] = noise_mask
    return {"inputs": side("inputs", shown, **given), "targets": side("targets", said, **given)}


def span_objective(noise_density, mean_noise_span_length, **_):
    return Objective(noise="spans", rate=noise_density, mean_span_length=mean_noise_span_length)


def span_counts(length, **given):
    u = uniforms(3, np.arange(50), 1, length)
    texts = CorruptionInputs(np.full(50, length), u, 200)
    mask = noise_mask(span_objective(**given), texts, 10_000).astype(int)
    found = {
        "num_noise_tokens": mask.sum(1),
        "num_noise_spans": (np.diff(mask, axis=1, prepend=0) == 1).sum(1),
        "starts_with_noise": mask[:, 0] > 0,
        "ends_with_noise": mask[:, -1] > 0,
    }
    assert all(len(set(values.tolist())) == 1 for values in found.values())  # the same for every seed
    return {name: values[0].item() for name, values in found.items()}


def span_lengths(inputs_length, **given):
    found = compute_lengths(span_objective(**given), inputs_length)
    return [found.raw, found.targets]


def from_lists(lists):
    """As theirs are stripped: without padding at the end."""
    lists = [np.trim_zeros(np.array(ids, np.int32), "b") for ids in lists]
    tokens = np.zeros((len(lists), max(map(len, lists))), np.int32)
    for row, ids in zip(tokens, lists, strict=True):
        row[: len(ids)] = ids
    return PaddedTexts(tokens, np.array([len(ids) for ids in lists], np.int32), tokens > 0)


def packed(inputs, targets, architecture, limits, pack=True):
    """The features of all examples, of each a row if they are not packed."""
    sides = np.stack([inputs.lengths, targets.lengths], axis=1)
    sides = sides if architecture == "encoder-decoder" else sides.sum(1, keepdims=True)
    starts = pack_examples(sides, row_capacity(architecture, limits)) if pack else np.arange(len(sides) + 1)
    rows = np.repeat(np.arange(len(starts) - 1), np.diff(starts))
    return make_packed_batch(
        inputs, targets, rows, architecture=architecture, lengths=limits, batch_size=len(starts) - 1
    )


def converted(architecture, config, examples, task_feature_lengths):
    room, pack = task_feature_lengths, config["pack"]
    inputs, targets = ([example.get(name, []) for example in examples] for name in ("inputs", "targets"))
    limits = Lengths(0, room.get("inputs", 0), room["targets"])
    found = packed(from_lists(inputs), from_lists(targets), architecture, limits, pack).features()
    padding, visible = found["decoder_segment_ids"] == 0, found.get("decoder_causal_attention", 0)
    # Where padding is read, theirs has a last EOS when nothing is packed; and it may be visible to the
    # prefix.
    found["decoder_input_tokens"] = np.ma.array(found["decoder_input_tokens"], mask=padding & (not pack))
    if config.get("loss_on_targets_only"):  # ours covers the inputs of a decoder too, as the paper's does
        found["decoder_loss_weights"] = np.ma.array(found["decoder_loss_weights"], mask=visible > 0)
    if "decoder_causal_attention" in found:
        found["decoder_causal_attention"] = np.ma.array(visible, mask=padding)
    return [{name: values[row] for name, values in found.items()} for row in range(len(padding))]


def packed_rows(dataset, feature_lengths, **_):
    room, ours = feature_lengths, {"inputs": "encoder_input_tokens", "targets": "decoder_target_tokens"}
    sides = (from_lists([row[name][: room[name]] for row in dataset]) for name in ours)
    found = packed(*sides, "encoder-decoder", Lengths(0, room["inputs"], room["targets"])).features()
    for name, side in (("inputs", "encoder"), ("targets", "decoder")):
        ours |= {f"{name}_{what}": f"{side}_{what}" for what in ("segment_ids", "positions")}
    return [
        {theirs: found[name][row] for theirs, name in ours.items()}
        for row in range(len(found[ours["inputs"]]))
    ]


def shifted(targets, sequence_id=None, bos_id=0, **_):
    segments = np.ones((1, len(targets)), int) if sequence_id is None else np.array([sequence_id])
    begins = np.diff(segments[0], prepend=-1) != 0  # ours begin with padding
    return np.ma.array(shift_right(np.array([targets]), segments)[0], mask=begins & (bos_id != 0))


def cut_before_eos(dataset, output_features, sequence_length):
    def ended(name, value):
        if not output_features.get(name, {}).get("add_eos"):
            return value
        rows = value if isinstance(value[0], list) else [value]
        tokens, counts, _ = pad_texts(rows, sequence_length[name] or 99)
        found = [row[:count].tolist() for row, count in zip(tokens, counts, strict=True)]
        return found if rows is value else found[0]

    return [{name: ended(name, value) for name, value in dataset[0].items()}]


# --- texts and metrics
# -----------------------------------------------------------------------------------------------


def first(value):
    return value[0] if isinstance(value, list) else value


def example(pair):
    return [dict(zip(("inputs", "targets"), pair, strict=True))]


def glue(x, benchmark_name, label_names, feature_names=None, **_):
    (row,) = x
    if benchmark_name in TASKS and "q1" not in row:
        return example(TASKS[benchmark_name].to_text(row))
    names = feature_names or sorted(set(row) - {"idx", "uid", "label"})
    made = classification(benchmark_name, " ".join(names), label_names, {}, "GLUE")
    return example(made.to_text(row))


def stsb(x):
    return example(TASKS["stsb"].to_text({name: first(value) for name, value in x[0].items()}))


def record(dataset):
    row = dataset[0] | {"passage": first(dataset[0]["passage"])}
    return [example(TASKS["record"].to_text(one))[0] for one in TASKS["record"].training_rows(row)]


def deduplicated(pages, min_num_sentences):
    rules, texts = (
        filters.Rules(sentences_per_page=min_num_sentences),
        [page["text"].split("\n") for page in pages],
    )
    hashes = [filters.span_hashes(lines, "lines") for lines in texts]
    marked = np.isin(np.arange(sum(map(len, hashes))), filters.repeated_indices(np.concatenate(hashes)))
    marked = np.split(marked, np.cumsum([len(part) for part in hashes])[:-1])
    left = [filters.remove_spans(lines, mark, "lines") for lines, mark in zip(texts, marked, strict=True)]
    found = [{"url": page["url"], "text": "\n".join(lines)} for page, lines in zip(pages, left, strict=True)]
    return [
        page for page, lines in zip(found, left, strict=True) if filters.has_enough_sentences(lines, rules)
    ]


def metric(targets, predictions, **ours):
    return {name: score(targets, predictions) for name, score in ours.items()}


def grouped(targets, predictions, **ours):
    pairs = [(target["group"], target["value"]) for target in targets]
    return metric(pairs, [prediction["value"] for prediction in predictions], **ours)
