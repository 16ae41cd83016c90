"""Models made of counts, in numpy alone: n-grams and the hidden Markov tagger.

V  vocabulary    K  tags (hidden states)    W  words that were seen in training
N  tokens of a text                         T  words of a sentence
"""
