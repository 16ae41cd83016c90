"""Corpora as tests read them: all documents, and what tells a corpus from others."""

from lm.data.corpora.corpus import corpus_shards
from lm.data.text.shards import documents_of, fingerprint_of


def documents(spec, split, cache, corrupt="stop"):
    return [*documents_of(corpus_shards(spec, split, cache, corrupt))]


def fingerprint(spec, split, cache):
    return fingerprint_of(corpus_shards(spec, split, cache))
