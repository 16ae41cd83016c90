"""Modules of a user's own: what they add is found by every command and process, what is wrong is named."""

import os
import pickle
import re
import shlex
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from commands import accepted
from drawn import drawn_model
from flax import nnx
from paths import ROOT

from experiments.__main__ import dispatch
from experiments.cli import COMMANDS
from experiments.runs import provenance
from experiments.runs.checks import check_experiment
from experiments.runs.kinds.pretraining import pretraining_spec
from experiments.runs.paths import load_settings, save_settings
from experiments.runs.result import write_result
from experiments.runs.sources import Sources
from experiments.study import plugins, registry
from experiments.study.entry_checks import check_mixer
from experiments.study.plugins import STUDY_VARIABLE, load_study, location_in_study, pop_study_option
from experiments.study.registry import build, find
from lm.batch import Batch, Side
from lm.config import base
from lm.config.base import SettingError, from_json, set_choices, to_json
from lm.config.layers import MlpConfig
from lm.config.training import OPTIMIZERS, LossConfig, SharedOptimizerSettings
from lm.data.tasks.mixtures import mixture
from lm.data.tasks.task_files import TEXT_METRICS
from lm.files import relative
from lm.nn.layers import ACTIVATIONS
from lm.nn.mlp import MLP
from lm.objectives.corruption import NOISES
from lm.objectives.denoising import OBJECTIVES, Objective
from lm.sharding import named
from lm.train.losses import TOKEN_LOSSES

GUIDE = (ROOT / "docs/extending.md").read_text("utf-8")
MODULES = {name: code for code, name in re.findall(r"```python\n(# (\w+\.py)\n.*?)```", GUIDE, re.DOTALL)}
SMALL = "--data.corpus text:words.txt --data.vocabulary bytes --tuning.mixtures --tuning.heads".split()


IMPORTS = (
    "from experiments.study.registry import add_rows, add_table\n"
    "from experiments.study.table import Axis, Conclusion, Published, make_table\n"
)

LOSSES = "from lm.train.losses import TOKEN_LOSSES\n"
NOISE = "from lm.objectives.corruption import NOISES, Noise\n\n"


@pytest.fixture
def loads(tmp_path, monkeypatch, restored_registry):
    """Loads modules of this text; afterwards the study is what it was."""
    tables, added = (
        dict(plugins._registries("MIXERS ACTIVATIONS TOKEN_LOSSES")),
        {field: dict(names) for field, names in base._ADDED.items()},
    )
    before = {name: dict(table) for name, table in tables.items()}
    modules = dict(sys.modules)
    monkeypatch.chdir(tmp_path)

    def load(**modules):
        for name, text in modules.items():
            (tmp_path / f"{name}.py").write_text(text)
        monkeypatch.setenv(STUDY_VARIABLE, "")
        pop_study_option([word for name in modules for word in ("--study", f"{name}.py")])
        load_study()

    monkeypatch.setenv(STUDY_VARIABLE, "")
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield load
    for name, table in tables.items():
        table.clear()
        table |= before[name]
    set_choices(Objective, "noise", NOISES)
    set_choices(SharedOptimizerSettings, "name", OPTIMIZERS)
    set_choices(MlpConfig, "activation", ACTIVATIONS | {"none": None})
    set_choices(LossConfig, "name", {"cross-entropy": None})
    base._ADDED.clear()
    base._ADDED.update(added)
    for name in sys.modules.keys() - modules.keys():
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


def lm(folder, *words, **variables):
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"} | variables
    command = [sys.executable, "-m", "experiments", *words]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


def test_all_that_the_guide_adds_is_built_and_used_by_name(loads):
    builtin = dict(registry.REGISTRY)
    loads(**{name.removesuffix(".py"): code for name, code in MODULES.items()})
    added = [name for name in registry.REGISTRY if name not in builtin]
    assert len(added) == 30
    with pytest.raises(
        SettingError, match=r"'devlin/5-tasks/ltr\+bilstm' cannot be built: it needs a bi-LSTM"
    ):
        build("devlin/5-tasks/ltr+bilstm", "nano")
    for name in (name for name in added if not registry.REGISTRY[name].needs):
        experiment = build(name, "pico")
        assert from_json(type(experiment), to_json(experiment)) == experiment
        check_mixer(experiment.model, experiment.data.inputs_length)
    assert build("hidden/even", "nano").objective.noise == "every-other"
    assert build("mixing/running-mean", "nano").model.mixer.kind == "running-mean"
    gated, plain = (
        jax.eval_shape(lambda row=row: MLP(build(row, "nano").model, nnx.Rngs(0)))
        for row in ("periodic/gated-snake", "periodic/snake")
    )
    assert gated.linear is not None and plain.linear is None
    spec = pretraining_spec(build("token-losses/poly-1", "nano"))
    assert spec.loss_config.name == "poly-1" and "poly-1" in TOKEN_LOSSES
    assert build("attention-variants/gated", "nano").model.has_attention_logits
    assert not build("mixing/running-mean", "nano").model.has_attention_logits
    salient = drawn_model(build("attention-variants/salient", "nano").model)
    batch = Batch(decoder=Side(tokens=np.arange(3, 9)[None]))
    gradients = named(jax.jit(jax.grad(lambda model: jnp.square(model(batch)).sum()))(salient))
    (gradient,) = (each for name, each in gradients.items() if name.endswith("salience"))
    assert np.abs(gradient).max() > 0
    assert [row.name for row in find("t5/6-corruption-rate")][-1] == "t5/6-corruption-rate/30"
    (task,) = mixture("words-backwards")
    row = {"summary": "to be"}
    assert task.to_text(row) == ("backwards: be to", "to be")
    assert task.evaluate([row, row], ["two", "be"]) == {"first_letters": 50.0, "score": 50.0}


def check_laws(row):
    """Run the guide's check of mixers for a row in place of its own."""
    (code,) = re.findall(r"```python\n(import jax\n[^`]*def check_laws.*?)```", GUIDE, re.DOTALL)
    exec(code.replace("attention-variants/log-distance", row), {})


@pytest.mark.parametrize(  # test_attention_subclass.py tries the term of scores of "salient"
    "row",
    [
        *(f"attention-variants/{kind}" for kind in ("gated", "log-distance")),
        *(
            pytest.param(f"attention-variants/{kind}", marks=pytest.mark.slow)
            for kind in ("salient", "differential")
        ),
    ],
)
def test_attention_of_the_guide_is_causal_packs_texts_and_decodes_with_its_cache(loads, row):
    loads(my_attention=MODULES["my_attention.py"])
    check_laws(row)


@pytest.mark.parametrize(
    ("name", "old", "new", "broken"),
    [
        (
            "attention-variants/log-distance",
            "inputs.key_positions[:, None]",
            "jnp.arange(key.shape[1])[None, None]",
            "a packed text differs",
        ),
        (
            "attention-variants/log-distance",
            "inputs.key_positions[:, None]",
            "jnp.resize(inputs.positions, (1, key.shape[1]))[:, None]",
            "the cache differs",
        ),
        ("attention-variants/gated", "self.gate(x))", "self.gate(x[:, ::-1]))", "reads later ones"),
        ("mixing/running-mean", "x", "x", "a packed text differs"),
    ],
)
def test_the_check_of_the_guide_finds_a_mixer_that_breaks_a_law(loads, name, old, new, broken):
    modules = {file.removesuffix(".py"): MODULES[file] for file in ("my_attention.py", "my_mixer.py")}
    assert any(old in text for text in modules.values())
    loads(**{file: text.replace(old, new) for file, text in modules.items()})
    with pytest.raises(AssertionError, match=broken):
        check_laws(name)


def test_commands_of_the_guide_are_accepted_as_they_stand(loads, monkeypatch, capsys):
    lines = re.findall(r"(?m)^    (lm --study .*)$", GUIDE)
    assert len(lines) >= 10
    loads(**{name.removesuffix(".py"): code for name, code in MODULES.items()})
    for line in lines:
        arguments = pop_study_option(shlex.split(line)[1:])
        assert accepted(arguments, monkeypatch) == 0, capsys.readouterr()


@pytest.mark.parametrize("place", [0, 1])
def test_a_command_finds_rows_wherever_the_module_is_named(place, tmp_path):
    (tmp_path / "my_rows.py").write_text(MODULES["my_rows.py"])
    words = ["show", "width/wide", "--diff"]
    words[place:place] = ["--study", "my_rows.py"]
    done = lm(tmp_path, *words)
    assert "model.mlp.d_ff: 256" in done.stdout, done.stderr


def test_a_command_finds_rows_by_the_environment_and_completes_them(loads, tmp_path, monkeypatch, capsys):
    loads(my_rows=MODULES["my_rows.py"])
    done = lm(tmp_path, "show", "width/wide", "--diff", LM_STUDY="my_rows.py")
    assert "model.mlp.d_ff: 256" in done.stdout, done.stderr
    kept = {name: COMMANDS[name] for name in ("show", "completion")}
    monkeypatch.setattr("experiments.cli.app.COMMANDS", kept)
    assert dispatch(["completion", "bash"]) == 0
    assert "width/wide" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("\n\nnonsense\n", r"my\.py:3.*'nonsense'"),
        ("x = (\n", r"my\.py:1"),
        (
            "from lm.objectives.denoising import OBJECTIVES\nchosen = OBJECTIVES['mask-lm']\n",
            r"my\.py:2: KeyError: 'mask-lm'; did you mean 'masked-lm'\?$",
        ),
        ("{'masked-lm': 1}['mask-lm']\n", r"my\.py:1: KeyError: 'mask-lm'$"),
        (
            IMPORTS + "add_table(make_table('a', '', {'b': {'model.mlp.d_fff': 1}}))\n",
            r"my\.py:3.*'model\.mlp\.d_fff'.*'model\.mlp\.d_ff'",
        ),
        (
            "from experiments.study.scales import SCALES\n"
            "SCALES['a'] = SCALES['nano'] | {'finetuning.evaluate_every': 9}\n",
            r"my\.py:2.*'finetuning\.evaluate_every'.*'pretraining\.evaluate_every'",
        ),
        (
            IMPORTS + "alike = [Conclusion('b', 'b', '', relation='alike')]\n"
            "add_table(make_table('a', '', {'b': {}}, conclusions=alike))\n",
            r"my\.py:4.*'a'.*relation='alike'.*'equivalent'",
        ),
        (
            IMPORTS + "from experiments.study.presets import BERT\n"
            "add_table(make_table('a', '', {'b': BERT | {'start.steps': 100}}))\n",
            r"my\.py:4.*'a/b'",
        ),
        (
            IMPORTS
            + "name = 'b'\nadd_table(make_table('a', '', {\n  'b': {'model.mlp.activation': 'rleu'}}))\n",
            r"my\.py:5.*model\.mlp\.activation='rleu' is not a choice; did you mean 'relu'",
        ),
        (
            "from lm.nn.layers import ACTIVATIONS\nACTIVATIONS['mean'] = lambda x: x.mean(-1)\n",
            r"my\.py:2: ACTIVATIONS\['mean'\] returns float32 \[2, 3\] .*it should return floats \[2, 3, 4\]",
        ),
        (
            "from lm.nn.layers import ACTIVATIONS\nACTIVATIONS['fails'] = lambda x: x @ x\n",
            r"my\.py:2: ACTIVATIONS\['fails'\] fails for features \[2, 3, 4\]: ",
        ),
        (
            LOSSES + "TOKEN_LOSSES['sum'] = lambda x, y: x.sum()\n",
            r"my\.py:2: TOKEN_LOSSES\['sum'\] returns float32 \[\] .*it should return floats \[2, 3\]",
        ),
        (
            LOSSES + "TOKEN_LOSSES['right'] = lambda x, y: x[..., 0] == y\n",
            r"my\.py:2: TOKEN_LOSSES\['right'\] returns bool \[2, 3\] for logits .*floats",
        ),
        (
            LOSSES + "TOKEN_LOSSES['cross-entropy'] = lambda x, y: x[..., 0]\n",
            r"my\.py:2: TOKEN_LOSSES\['cross-entropy'\] is the project's own; choose another name",
        ),
        (
            IMPORTS + "add_table(make_table('a', '', {'b': {'pretraining.loss.z_loss': -1.0}}))\n",
            r"my\.py:3: row 'a/b': pretraining\.loss\.z_loss=-1\.0 should be at least 0",
        ),
        (
            IMPORTS + "add_table(make_table('a', '', {'b': {'finetuning.optimizer.learning_rate': -1.0}}))\n",
            r"my\.py:3: row 'a/b': finetuning\.optimizer\.learning_rate=-1\.0 should be above 0",
        ),
        (
            NOISE + "NOISES['odd'] = Noise(lambda config, texts: texts.uniforms[:, 0])\n",
            r"my\.py:3: NOISES\['odd'\] returned float32 .*it should return bool \[B,L\]",
        ),
        (
            NOISE + "def odd(config, texts):\n    return texts.no\n\nNOISES['odd'] = Noise(odd)\n",
            r"my\.py:4: NOISES\['odd'\] fails: AttributeError: texts has no 'no'; it has lengths, uniforms, ",
        ),
        (
            NOISE + "def odd(config, texts):\n    return texts.word_starts\n\nNOISES['odd'] = Noise(odd)\n",
            r"my\.py:4: NOISES\['odd'\] reads texts\.word_starts, .*Noise\(\.\.\., needs_word_starts=True\)",
        ),
        (
            NOISE + "NOISES['odd'] = Noise(lambda _, texts: texts.sentence_starts, needs_word_starts=True)\n",
            r"my\.py:3: NOISES\['odd'\] reads texts\.sentence_starts, .*, needs_sentence_starts=True\)",
        ),
        (
            NOISE + "import numpy as np\nrng = np.random.default_rng(0)\n"
            "NOISES['odd'] = Noise(lambda _, texts: rng.random(texts.uniforms[:, 0].shape) < 0.5)\n",
            r"my\.py:5: NOISES\['odd'\] returns another mask when it is called again .*texts\.uniforms",
        ),
        (
            NOISE + "NOISES['odd'] = Noise(NOISES['iid'].mask, ignores=('rate',))\n",
            r"my\.py:3: NOISES\['odd'\] ignores 'rate' and has no counts: .*Noise\(\.\.\., counts=\.\.\.\)",
        ),
        (
            NOISE + "NOISES['odd'] = Noise(NOISES['iid'].mask, counts=lambda *_: 3)\n",
            r"my\.py:3: the counts of NOISES\['odd'\] should be NoiseCounts",
        ),
        (
            NOISE + "NOISES['odd'] = NOISES['suffix']._replace(counts=NOISES['spans'].counts)\n",
            r"my\.py:3: the counts of NOISES\['odd'\] give num_noise_tokens=\[0, 1, .* its mask has \[",
        ),
        (IMPORTS + "add_rows('gpt', {'base': {}})\n", r"my\.py:3.*'gpt/base'"),
        (
            IMPORTS + "add_table(make_table('gpt', '', {'mine': {}}))\n",
            r"my\.py:3.*'gpt'",
        ),
        (
            IMPORTS + "add_rows('gtp', {'mine': {}})\n",
            r"my\.py:3.*'gtp'.*'gpt'",
        ),
        (
            IMPORTS + "add_table(make_table('a', '', {'b c': {}}))\n",
            r"my\.py:3.*'a/b c'",
        ),
        (
            IMPORTS + "add_table(make_table('a', '', {'b': {}}, baseline='gpt/bass'))\n",
            r"my\.py:3.*'gpt/bass'.*'gpt/base'",
        ),
        (
            IMPORTS + "add_table(make_table('a', '', {'b': {}}, baseline='jo/5-objective/mse'))\n",
            r"my\.py:3.*table 'a': .* row 'jo/5-objective/mse' cannot be built: .* a table with another",
        ),
        (
            IMPORTS + "add_rows('jo/5-objective', {'b': {}})\n",
            r"my\.py:3.*table 'jo/5-objective': .* since row .* cannot be built: .* a table with another",
        ),
        (
            IMPORTS + "add_table(make_table('a', '', {'b': {}}, scale='nanno'))\n",
            r"my\.py:3.*'nanno'.*'nano'",
        ),
        (
            IMPORTS + "add_table(make_table('a', '', {'b': {}}, seeds=0))\n",
            r"my\.py:3.*'a'",
        ),
        (
            IMPORTS + "add_table(make_table('a', '', {'b': {}}, axis=Axis('model.mlp.dff', '')))\n",
            r"my\.py:3.*'a'.*'model.mlp.dff'",
        ),
        (
            IMPORTS + "add_table(make_table('a', '', {'b': {}}, axis=Axis('model.mlp.activation', '')))\n",
            r"my\.py:3.*'a'.*'relu'",
        ),
        (
            IMPORTS + "add_table(make_table('a', '', {'b': {}}, conclusions=[Conclusion('b', 'c', '')]))\n",
            r"my\.py:3.*'a'.*'c'",
        ),
        (
            IMPORTS + "scores = {'b': Published('b', {'x': 1.0})}\n"
            "add_table(make_table('a', '', {'b': {}}, published=scores))\n",
            r"my\.py:4.*'a/b'",
        ),
        (
            "from lm.objectives.corruption import NOISES\nNOISES['iid'] = None\n",
            r"my\.py:2.*'iid'",
        ),
        (
            "from lm.objectives.corruption import NOISES\n"
            "NOISES['b'] = NOISES['iid']._replace(ignores=('rat',))\n",
            r"my\.py:2.*NOISES\['b'\] ignores 'rat'; did you mean 'rate'",
        ),
        (
            "from experiments.study.scales import SCALES\nSCALES['tiny'] = {'model.mlp.d_ff': 'wide'}\n",
            r"my\.py:2.*'tiny'.*'wide'",
        ),
        (
            "def half(number, experiment):\n    return number / zero\n\n"
            + IMPORTS
            + "add_table(make_table('a', '', {'b': {'model.mlp.d_ff': half}}))\n",
            r"my\.py:2.*'a/b'.*'zero'",
        ),
        (
            "from experiments.study.scales import SCALES\nSCALES['nano']['pretraining.steps'] = 1\n",
            r"my\.py:2",
        ),
        (
            "from experiments.study.scales import SCALES\nSCALES['nano'].update({'pretraining.steps': 1})\n",
            r"my\.py:2",
        ),
        (
            "from experiments.study.scales import SCALES\nSCALES['nano'] |= {'pretraining.steps': 1}\n",
            r"my\.py:2",
        ),
        (
            "from experiments.study.registry import REGISTRY\n"
            "REGISTRY['gpt/base'].changes['pretraining.steps'] = 1\n",
            r"my\.py:2",
        ),
        (
            "from experiments.study.registry import REGISTRY\n"
            "REGISTRY['t5/1-baseline/baseline'].published['GLUE'] = 1.0\n",
            r"my\.py:2",
        ),
        (
            "from experiments.study.registry import REGISTRY\nREGISTRY.pop('gpt/base')\n",
            r"my\.py:2.*'gpt/base'",
        ),
        (
            "from experiments.study.registry import TABLES\ndel TABLES['gpt']\n",
            r"my\.py:2.*'gpt'",
        ),
        (
            "from experiments.study.registry import TABLES\nfrom dataclasses import replace\n"
            "TABLES['gpt'] = replace(TABLES['gpt'], baseline='bert/base')\n",
            r"my\.py:3.*'gpt'",
        ),
        (
            "from experiments.study.registry import REGISTRY\nfrom dataclasses import replace\n"
            "REGISTRY['a/b'] = replace(REGISTRY['gpt/base'], name='a/b')\n",
            r"my\.py:3.*'a/b'",
        ),
        ("import sys\nsys.exit(3)\n", r"my\.py:2"),
        ("raise KeyError\n", r"my\.py:1: KeyError: $"),
        (
            "from experiments.study.registry import TABLES\nTABLES['a'] = 5\n",
            r"my\.py: AttributeError: 'int' object has no attribute 'rows'$",
        ),
        (
            "from lm.data.tasks.benchmarks import TASKS\nTASKS['a'] = 5\n",
            r"my\.py: AttributeError: 'int' object has no attribute 'targets_length'$",
        ),
    ],
)
def test_what_is_wrong_with_a_module_is_named_with_its_file_and_line(text, message, loads):
    with pytest.raises(SettingError, match=f"^{message}"):
        loads(my=text)


def test_of_two_modules_that_add_one_name_the_first_is_named_as_its_owner(loads):
    scale = "from experiments.study.scales import SCALES\nSCALES['tiny'] = SCALES['nano'] | {'seed': %d}\n"
    with pytest.raises(SettingError, match=r"^second\.py:2: SCALES\['tiny'\] is added by first\.py"):
        loads(first=scale % 1, second=scale % 2)


OUTSIDE = (
    ("../../a", "b"),
    ("a", "../../b"),
    ("a", ".."),
    ("a", "."),
    ("a/./b", "c"),
    ("/a", "b"),
    ("a", "/b"),
    ("a//b", "c"),
    ("", "b"),
    ("a", ""),
    ("-a", "b"),
    ("pretraining", "b"),
    ("reports/a", "b"),
    ("a", "seed-0"),
    ("own", "base,model.mlp.d_ff=64"),
    ("t5", "1-baseline"),
)


@pytest.mark.parametrize(("table", "row"), OUTSIDE)
def test_a_row_whose_folder_would_be_elsewhere_or_anothers_is_refused(table, row, loads):
    before = dict(registry.REGISTRY), dict(registry.TABLES)
    adds = f"{IMPORTS}add_table(make_table({table!r}, '', {{{row!r}: {{}}}}))\n"
    with pytest.raises(SettingError, match=r"^my\.py:3: row "):
        loads(my=adds)
    assert (dict(registry.REGISTRY), registry.TABLES) == before, "nothing is half added"


@pytest.mark.parametrize(
    "text",
    [
        "from experiments.study.scales import SCALES\nSCALES['../a'] = SCALES['nano'] | {}\n",
        "from experiments.study.scales import SCALES\nSCALES['cache'] = SCALES['nano'] | {}\n",
        "from experiments.study.scales import SCALES\nSCALES['a/b'] = SCALES['nano'] | {}\n",
        "from dataclasses import replace\nfrom lm.data.tasks.benchmarks import TASKS\n"
        "TASKS['../t'] = replace(TASKS['cola'], name='../t')\n",
        "from dataclasses import replace\nfrom lm.data.tasks.benchmarks import TASKS\n"
        "TASKS['t'] = replace(TASKS['cola'], name='../t')\n",
        "from lm.data.tasks.mixtures import MIXTURES, Mixture\nMIXTURES['..'] = Mixture(('cola',), 4)\n",
        "from experiments.study.registry import REGISTRY\nfrom dataclasses import replace\n"
        "REGISTRY['a/b'] = replace(REGISTRY['gpt/base'], name='a/../../b')\n",
        IMPORTS + "add_table(make_table('report', '', {'a': {}}))\n",
        IMPORTS + "add_table(make_table('order', '', {'a': {}}))\n",
        IMPORTS + "add_table(make_table('history/lstm', '', {'a': {}}))\n",
        IMPORTS + "add_table(make_table('t5-1/baseline', '', {'a': {}}))\n",
    ],
)
def test_names_that_become_folders_and_files_are_refused_where_they_would_lie_elsewhere(text, loads):
    with pytest.raises(
        SettingError,
        match=r"^my\.py:\d: .*(scale|task|TASKS|REGISTRY|files of table|table .* the name of a row)",
    ):
        loads(my=text)


def test_a_start_is_named_by_a_folder_and_not_by_a_path():
    with pytest.raises(SettingError, match=r"start\.model='\.\./a'.*--start PATH"):
        build("gpt/base", "nano", {"start.model": "../a"})


def test_a_module_that_is_interrupted_ends_as_any_command_does(tmp_path):
    (tmp_path / "my.py").write_text("raise KeyboardInterrupt\n")
    done = lm(tmp_path, "list", "--study", "my.py")
    assert (done.returncode, "Traceback" in done.stderr) == (130, False), done.stderr


def test_a_module_that_is_not_there_or_is_called_as_another_is_refused(loads, tmp_path):
    with pytest.raises(SettingError, match="--study"):
        pop_study_option(["list", "--study"])
    pop_study_option(["list", "--study=none.py"])
    with pytest.raises(SettingError, match=r"--study none\.py"):
        load_study()
    with pytest.raises(SettingError, match=r"--study json\.py"):
        loads(json="")


def test_a_module_is_loaded_once_however_its_path_is_spelt(loads, tmp_path, monkeypatch):
    (tmp_path / "my.py").write_text("import sys\nsys.loads_of_my = getattr(sys, 'loads_of_my', 0) + 1\n")
    (tmp_path / "linked").symlink_to(tmp_path)
    spellings = "my.py", str(tmp_path / "my.py"), "./linked/my.py"
    for names in (*spellings, os.pathsep.join(spellings)):
        monkeypatch.setenv(STUDY_VARIABLE, names)
        load_study()
        assert len(plugins.study_files()) == 1 and plugins.study_files()[0].is_absolute()
    assert sys.__dict__.pop("loads_of_my") == 1


@pytest.mark.parametrize("name", ["wave", "sentencepiece", "launch"])  # of Python, of a package, of this one
def test_a_module_that_would_replace_another_which_is_imported_later_is_refused(name, loads, monkeypatch):
    monkeypatch.delitem(sys.modules, name, raising=False)
    for _ in range(2):
        with pytest.raises(SettingError, match=rf"--study {name}\.py: .* module '{name}'.*; rename it$"):
            loads(**{name: ""})
        assert name not in sys.modules


def test_a_module_may_begin_with_a_byte_order_mark(loads, tmp_path):
    adds = IMPORTS + "add_table(make_table('a', '', {'b': {}}))\n"
    (tmp_path / "my.py").write_text(adds, "utf-8-sig")
    pop_study_option(["--study", "my.py"])
    load_study()
    assert "a/b" in registry.REGISTRY


def test_an_error_in_what_a_module_added_names_its_line(loads):
    loads(
        mine="from lm.data.tasks.task_files import TEXT_METRICS\n\n\ndef score(targets, predictions):\n"
        "    return targets.no\n\n\nTEXT_METRICS['mine'] = score\n"
    )
    with pytest.raises(AttributeError) as caught:
        TEXT_METRICS["mine"]([], [])
    assert location_in_study(caught.value) == "mine.py:5: "
    assert location_in_study(ValueError()) == ""


def test_a_run_is_not_resumed_without_its_modules_or_with_others(loads, tmp_path):
    def current():
        same = {"settings": {}, "vocabulary": {"fingerprint": ""}, "data": {}, "packages": {}}
        return same | {"code": {k: v for k, v in provenance.code().items() if k.startswith("--study")}}

    loads(mine="x = 1\n")
    provenance.record(tmp_path, current())
    provenance.check(tmp_path, current(), "begun", frozenset())
    (tmp_path / "mine.py").write_text("x = 2\n")
    with pytest.raises(SettingError, match=r"code: --study mine\.py: \w{12} -> \w{12}\n"):
        provenance.check(tmp_path, current(), "begun", frozenset())
    os.environ[STUDY_VARIABLE] = ""
    with pytest.raises(SettingError, match=r"code: --study mine\.py: \w{12} -> none\n"):
        provenance.check(tmp_path, current(), "begun", frozenset())


@pytest.mark.parametrize("stage", ["run/pretraining", "pretraining/0123"])
def test_settings_that_only_a_module_knows_are_said_to_need_it(stage, loads, tmp_path):
    """Also where all of its stages are shared with other runs, and lie outside of its folder."""
    loads(
        mine="from lm.objectives.corruption import NOISES, Noise\n"
        "NOISES['mine'] = Noise(NOISES['iid'].mask)\n"
    )
    run = tmp_path / "nano" / "run"
    save_settings(run, build("gpt/base", "nano", {"objective.noise": "mine"}), tmp_path / "cache")
    folder = tmp_path / "nano" / stage
    provenance.record(folder, {"code": provenance.code()})
    scores = {"columns": {}, "tasks": {}, "held_out_loss": 3.0, "seconds": 1.0, "tokens": 9}
    write_result(run, scores | {"phases": {"pretraining": stage}})
    assert load_settings(run).objective.noise == "mine"
    set_choices(Objective, "noise", {"iid": NOISES["iid"]})
    with pytest.raises(SettingError, match=r"--study mine\.py$"):
        load_settings(run)


def test_modules_of_the_option_come_behind_those_of_the_environment(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(STUDY_VARIABLE, "a.py")
    assert pop_study_option(["list", "--study", "b.py", "--study=./a.py"]) == ["list"]
    assert plugins.study_files() == [tmp_path / "a.py", tmp_path / "b.py"]


def test_the_words_that_start_a_process_again_lack_the_option(monkeypatch):
    from experiments.__main__ import move_study_option_to_environment

    monkeypatch.setenv(STUDY_VARIABLE, "")
    monkeypatch.setattr(sys, "argv", ["lm", "run", "--study", "a.py", "gpt/base"])
    monkeypatch.setattr(sys, "orig_argv", ["python", "-X", "dev", "-m", "experiments", *sys.argv[1:]])
    move_study_option_to_environment()
    assert sys.orig_argv == ["python", "-X", "dev", "-m", "experiments", "run", "gpt/base"]
    assert plugins.study_files() == [Path("a.py").absolute()]


def test_what_is_sent_to_another_process_brings_the_modules_along(loads, tmp_path):
    loads(**{name.removesuffix(".py"): MODULES[name] for name in ("my_objectives.py", "my_tasks.py")})
    sent = [build("hidden/even", "nano").objective, *mixture("words"), *mixture("words-backwards")]
    (tmp_path / "sent").write_bytes(pickle.dumps(sent))
    os.environ[STUDY_VARIABLE] = os.pathsep.join(
        ("my_objectives.py", "my_tasks.py")
    )  # relative, as a user may write
    code = (
        "import pickle; one, *tasks = pickle.load(open('sent', 'rb')); "
        "print(one.corruption.fits_without_trimming, len(tasks))"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.stdout == "True 3\n", done.stderr


@pytest.mark.slow
def test_workers_of_a_sweep_and_of_data_have_what_a_module_adds(tmp_path):
    """Each row is trained by a process of its own, whose batches are prepared by another."""
    for name, code in MODULES.items():
        (tmp_path / name).write_text(code)
    (tmp_path / "words.txt").write_text(
        "\n\n".join(f"one two three {n} four five six" * 30 for n in range(400))
    )
    studies = os.pathsep.join(MODULES)
    settings = [*SMALL, "--scale", "pico", "--data.workers", "1"]
    settings += "--start.steps 0 --pretraining.steps 4 --pretraining.save_every 4".split()
    settings += "--pretraining.evaluate_every 4".split()
    for pattern in ("hidden", "mixing"):
        done = lm(tmp_path, "sweep", pattern, *settings, "--jobs", "2", LM_STUDY=studies)
        assert done.returncode == 0, done.stderr + done.stdout
    records = [file.read_text() for file in tmp_path.glob("runs/pico/**/origin.json")]
    assert records and all("--study my_objectives.py" in record for record in records)


@pytest.mark.parametrize("arguments, message", [("inputs", ""), ("", r"3 positional arguments but 4")])
def test_a_mixer_that_fails_in_the_model_is_refused_before_data_are_prepared(
    loads, tmp_path, arguments, message
):
    code = (
        f"{IMPORTS}from experiments.study.classic import DECODER\n"
        "from lm.nn.attention import Attention\nfrom lm.nn.mixers import MIXERS\n\n"
        "class Mine(Attention):\n"
        f"    def score_bias(self, query, key, {arguments}):\n"
        "        return None\n\n"
        "MIXERS['mine'] = Mine\n"
        "add_table(make_table('m', 'Mine', {'a': DECODER | {'model.mixer.kind': 'mine'}}))\n"
    )
    loads(my_mixer=code)
    experiment = build("m/a", "nano")
    refused = f"model.mixer.kind='mine' fails for rows of 64 tokens.*{message}"
    with pytest.raises(SettingError, match=refused) if message else nullcontext():
        check_experiment(experiment, Sources(tmp_path))


def test_a_setting_that_the_noise_of_a_module_ignores_is_refused(loads):
    loads(
        mine="from lm.objectives.corruption import NOISES, Noise\n"
        "NOISES['mine'] = NOISES['spans']._replace(ignores=('rate',))\n"
    )
    experiment = build("t5/1-baseline/baseline", "nano", {"objective.noise": "mine"})
    assert base.unused_settings(experiment, ["objective.rate"])
    assert not base.unused_settings(experiment, ["objective.mean_span_length"])


def test_a_sweep_names_rows_of_a_module_that_change_nothing(loads, tmp_path, capsys):
    loads(my=IMPORTS + "add_table(make_table('a', '', {'b': {}, 'c': {'model.mlp.activation': 'relu'}}))\n")
    assert dispatch(["sweep", "a", "--scale", "nano", "--runs", str(tmp_path / "runs"), "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert "a/c is the same experiment as t5/1-baseline/baseline at this scale" in said


def test_a_module_that_is_refused_is_refused_again_and_leaves_nothing(loads):
    text = (
        "from lm.objectives.denoising import OBJECTIVES, Objective\n"
        "OBJECTIVES['mine'] = Objective()\n" + IMPORTS + "add_table(make_table('a', '', {'b': {}}))\n"
    )
    for fault, message in (("nonsense\n", "'nonsense'"), ("add_rows('a', {'b c': {}})\n", "'a/b c'")):
        for _ in range(2):
            with pytest.raises(SettingError, match=message):
                loads(my=text + fault)
            assert "mine" not in OBJECTIVES and "a/b" not in registry.REGISTRY and "my" not in sys.modules


def test_a_refused_module_leaves_no_choice_of_a_setting_and_is_no_owner(loads, tmp_path):
    added = NOISE + (
        "from lm.nn.layers import ACTIVATIONS\n"
        "NOISES['odd'] = NOISES['iid']\n"
        "ACTIVATIONS['bent'] = ACTIVATIONS['relu']\n"
    )
    choices = base._hints(Objective)["noise"]
    wrong = IMPORTS + "add_table(make_table('a', '', {'b': {'model.d_modell': 1}}))\n"
    with pytest.raises(SettingError, match="d_modell"):
        loads(my=added + wrong)
    assert base._hints(Objective)["noise"] == choices
    for settings in ({"objective.noise": "odd"}, {"model.mlp.activation": "bent"}):
        with pytest.raises(SettingError, match="odd|bent"):
            build(registry.BASELINE_ROW, "nano", settings)
    assert "odd" not in base._ADDED.get((Objective, "noise"), {})
    assert tmp_path / "my.py" not in plugins._MODULE_OF_ENTRY.values()
    loads(mine=added)  # under another name it is accepted
    assert build(registry.BASELINE_ROW, "nano", {"objective.noise": "odd"}).objective.noise == "odd"


def test_a_finished_run_of_another_module_is_said_to_be_one(loads, tmp_path):
    loads(my="ROWS = 1\n")
    stage = tmp_path / "stage"
    stage.mkdir()
    record = {"settings": {}, "vocabulary": {"fingerprint": "0"}, "data": {}, "packages": {}}
    provenance.record(stage, record | {"code": {"lm/x.py": "0", **provenance.own_code()}})

    def note(*runs):
        """The note on runs with these folders of stages, and on one that cannot be read."""
        found = [
            SimpleNamespace(
                folder=tmp_path / f"run{i}", stage_folders=lambda folders=each: dict(enumerate(folders))
            )
            for i, each in enumerate(runs)
        ]
        return provenance.other_modules_note([*found, None])

    assert not note([stage], [tmp_path / "damaged"])
    (tmp_path / "my.py").write_text("ROWS = 1  # as before\n")
    assert not note([stage]), "comments do nothing"
    (tmp_path / "my.py").write_text("ROWS = 2\n")
    one = note([stage], [])
    assert one.startswith("1 finished run was trained with another my.py")
    assert f"delete {relative(tmp_path / 'run0')}, {relative(stage)}." in one, "a shared stage too"
    assert "run1" not in one and "--allow code" in one
    two = note([stage], [stage])
    assert two.startswith("2 finished runs were")
    assert all(f"run{i}" in two for i in range(2)) and two.count(relative(stage)) == 1
    own = tmp_path / "run0" / "finetuning"
    own.mkdir(parents=True)
    provenance.record(own, record | {"code": {f"{plugins.STUDY_OPTION} my.py": "0"}})
    assert f"delete {relative(tmp_path / 'run0')}." in note([own])
