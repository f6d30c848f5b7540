"""wellposed bench: the measured comparisons with peers."""

from tyro.extras import SubcommandApp

from wellposed.bench import ConditionBench

app = SubcommandApp()


@app.command
def condition(config: ConditionBench) -> None:
    """Time wellposed.condition_ against one full SVD per head and per W_V, W_O pair.

    Args:
        config: what to measure.
    """
    print(config.run().markdown())
