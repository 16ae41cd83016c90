"""Masks written out as matrices, bool [B|1,T,S]: what those of ``lm.ops.masks`` are compared with."""

import numpy as np


def distances(length, key_length):
    """int32 [1,T,S]: the key's place minus the query's."""
    return (np.arange(key_length)[None, :] - np.arange(length)[:, None])[None]


def causal(distance):
    """A query sees itself and everything before it."""
    return distance <= 0


def sliding_window(distance, *, behind, ahead, step=1):
    """A query sees ``behind`` positions before it and ``ahead`` after it, in steps (Beltagy et al. 2020)."""
    return (distance >= -behind) & (distance <= ahead) & (distance % step == 0)


def prefix(member):
    """[B,T,T] from ``member`` [B,T], non-zero in the prefix: the positions of the prefix see one another."""
    return (member > 0)[:, :, None] & (member > 0)[:, None, :]


def same_segment(query, key):
    """[B,T,S] from segment ids [B,T] and [B,S]: equal ones see one another; segment 0, padding, nobody."""
    return (query[:, :, None] == key[:, None, :]) & (key > 0)[:, None, :]


def global_tokens(query, key):
    """[B,T,S] from [B,T] and [B,S], non-zero where a position is global: it sees all and is seen by all."""
    return (query > 0)[:, :, None] | (key > 0)[:, None, :]
