"""What tests of the documentation share."""

import importlib.util
import sys

import pytest
from paths import ROOT


@pytest.fixture(scope="session")
def check_script():
    """docs/results/check.py as a module."""
    spec = importlib.util.spec_from_file_location("check_results", ROOT / "docs/results/check.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
