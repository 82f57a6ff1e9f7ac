"""What lightning-ir and its dependencies warn of, about themselves."""

import pytest
from tests.lightning_ir import tiny


@pytest.fixture(scope="session")
def backbone(tmp_path_factory):
    return tiny.save_backbone(tmp_path_factory.mktemp("backbone"))
