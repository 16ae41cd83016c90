"""One denoiser or a mixture of several, and which: UL2, T5Gemma 2, fill-in-the-middle and GLM beside T5's.

All rows are the same encoder-decoder with inputs of the same length. They differ in how much of a text they
predict, so that a row with long targets spends more FLOP; reports compare rows after all of their training
and where they had spent equal FLOP. Tasks are read without a mode token.

Of the two halves of the tasks, *reading* has questions that nobody answers without their input; *language*
asks how well a model knows the language of the text.
"""

from experiments.study.changes import denoiser_mixture, objective
from experiments.study.table import Conclusion, make_table

TABLES = (
    make_table(
        "now/3-denoisers",
        "One denoiser or a mixture",
        {
            "baseline": {},
            "spans": objective("span-corruption"),
            "ul2": denoiser_mixture("ul2"),
            "ul2-without-modes": denoiser_mixture("ul2-without-modes"),
            "t5gemma-2": denoiser_mixture("t5gemma-2"),
            "fill-in-the-middle": objective("fill-in-the-middle"),
            "glm": denoiser_mixture("glm"),
        },
        scale="mini",
        seeds=5,
        # Written down before the rows were trained, each with what is expected in either half, and why.
        conclusions=(
            # Raffel et al. 2020, tables 5 and 7: spans are as good as single tokens, or a little better.
            Conclusion("spans", "baseline", "spans are harder to guess than tokens"),
            # Tay et al. 2022: the mixture is ahead of span corruption in fine-tuning and in generation. Most
            # of its denoisers predict more of a text, and so short a training learns by what is predicted.
            Conclusion("ul2", "spans", "most denoisers predict more of a text"),
            # Tay et al. 2022 fine-tune with the mode token of a task's kind. Without it, as here, the inputs
            # of a task begin as no inputs of pre-training do, which should matter where inputs are needed.
            Conclusion("ul2-without-modes", "ul2", "tasks have no mode token", tasks="reading"),
            # Half of the rows of T5Gemma 2 (Zhang et al. 2025) predict a suffix of three quarters of the
            # text: it is the most like a language model, and reads the least text around gaps.
            Conclusion("ul2", "t5gemma-2", "gaps have text on both sides", tasks="reading"),
            Conclusion("t5gemma-2", "ul2", "half of its rows predict a long suffix", tasks="language"),
            # Bavarian et al. 2022 find that language modeling does not suffer from filling in; one middle of
            # a third of the text has more targets than T5's spans, and never many gaps to keep apart.
            Conclusion(
                "fill-in-the-middle", "spans", "a long middle has more targets than spans", tasks="language"
            ),
            Conclusion(
                "ul2", "fill-in-the-middle", "many gaps teach where to look, one does not", tasks="reading"
            ),
            # Du et al. 2022: shuffled blanks together with long suffixes serve reading and writing.
            Conclusion("glm", "spans", "half of its rows predict long suffixes", tasks="language"),
        ),
    ),
)
