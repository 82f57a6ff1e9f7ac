"""The folder that every test of lightning-ir starts from."""

import pytest

from tests.lightning_ir import tiny


@pytest.fixture(scope="session")
def backbone(tmp_path_factory):
    return tiny.save_backbone(tmp_path_factory.mktemp("backbone"))
