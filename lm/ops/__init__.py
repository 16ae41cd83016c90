"""Pure array functions: no parameters, no flax. Shapes are written in one alphabet everywhere.

B  batch                    N  query heads                         D  model width (``d_model``)
T  length of the queries    K  key and value heads, N % K == 0     F  feed-forward width (``d_ff``)
S  length of the keys       H  width of one head (``d_kv``)        V  vocabulary (``vocab_size``)

``[B|1,T,S]`` (in annotations ``"#B T S"``) means that this axis is either B or 1 long and broadcasts.
Values may have another width than H (``d_v``), Hv, which the result then has.
Annotations of jaxtyping say the same as the docstrings; the tests check every call against them. Masks and
biases are the exception: functions that take them say in an error of their own how to mend a wrong one.
"""
