"""The commands of ``lm``: which there are, where each is, and what it does in a line.

A command is one function, whose signature is its options and whose docstring its help; it is imported when
asked for.
"""

COMMANDS = {  # name -> module of experiments.cli : function
    "list": "show:show_rows",
    "show": "show:show_row",
    "diff": "show:show_diff",
    "run": "train:run_command",
    "plan": "plan:plan",
    "prepare": "plan:prepare_row",
    "sweep": "train:sweep_command",
    "report": "show:report_command",
    "verify": "doctor:verify_runs",
    "clean": "clean:clean",
    "tasks": "doctor:show_tasks",
    "score": "score:score",
    "likelihood": "likelihood:likelihood",
    "harness": "likelihood:harness",
    "generate": "models:generate",
    "fill": "models:fill_in",
    "draw": "draw:draw",
    "attention": "draw:attention",
    "neighbours": "models:show_neighbours",
    "convert": "convert:import_or_export",
    "examples": "models:show_examples",
    "doctor": "doctor:examine",
}
# read their arguments themselves: what their options are depends on them
RAW = ("run", "sweep", "report", "plan", "prepare", "convert", "draw", "harness")
HELP = """\
list       List the rows of the study, what each changes, and how many seeds of it have finished.
show       Show every setting of a row or a published model, or --stages of its run, or what it --costs.
diff       Show the settings in which a row differs from another.
run        Train, fine-tune and evaluate one row; any of its settings can be changed on the command line.
plan       Compile rows for a TPU slice that need not exist: memory, time and hours before you pay for them.
prepare    Encode what a row reads of its corpus ahead of its training, with all cores, and say what it takes.
sweep      Train and evaluate every row that matches and has not finished, then write the report.
report     Write the tables of all finished runs beside the paper's: Markdown, a web page, CSV and pictures.
verify     Check every file of the checkpoints of runs against the checksums that were saved with them.
clean      Turn a folder of texts, JSON lines or WET files into a corpus by the rules that made C4.
tasks      List the tasks: how each is answered and scored, and the rows of what is prepared here.
score      Score a run or an imported checkpoint on tasks, or predictions that were made elsewhere.
likelihood Show the log-probability of texts, or of continuations of contexts: nats, and bits per byte.
harness    Evaluate a run by lm-evaluation-harness: its options, with --model_args run=RUN.
generate   Show what a run's model writes after prompts: greedy, sampled or beam search.
fill       Show what a masked language model puts for each [MASK] of a text: "Paris is the [MASK] of France."
draw       Draw masks, positions, what a model does with a text, what it costs here; alone: list the pictures.
attention  Draw where each head of a run's model attends in a text.
neighbours Show the pieces whose vectors are nearest to a word's: of skip-gram, or of a model's embedding.
convert    Import a published checkpoint as a run, or export a run's model in the published format.
examples   Print pre-training and fine-tuning examples of a row, decoded, as the model sees them.
doctor     Show devices, versions, data found and free disk space."""
