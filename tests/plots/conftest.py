import pytest


@pytest.fixture
def plt():
    pytest.importorskip("matplotlib").use("agg")
    import matplotlib.pyplot as plt

    yield plt
    plt.close("all")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "plt" in getattr(item, "fixturenames", ()):
            item.add_marker("integration")
