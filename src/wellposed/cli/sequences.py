"""wellposed sequences: softmax against other attention on ListOps and on text."""

from collections.abc import Callable

from tyro.extras import SubcommandApp

from wellposed.studies.sequence_config import CONFIGS, SequenceStudy

app = SubcommandApp()


def _command(name: str, default: SequenceStudy) -> Callable[..., None]:
    def command(config: SequenceStudy = default) -> None:
        from rich.console import Console
        from rich.table import Table

        from wellposed.studies.sequences import sequences

        table = Table("attention", "seed", "test accuracy, %", "test loss", "norm of attention", title=name)
        for outcome in sequences(config):
            table.add_row(*outcome.row(config.task))
        Console().print(table)
        print(f"The runs: {config.out}")

    size = "of full size, on a GPU" if name.endswith("full") else "on a CPU in minutes"
    what = "the value of nested operations" if default.task == "listops" else "the next byte of a text"
    command.__doc__ = f"Learn {what} with softmax and with degree 3, {size}.\n\nArgs:\n    config: what to train."
    return command


for _name, _default in CONFIGS.items():
    app.command(name=_name)(_command(_name, _default))
