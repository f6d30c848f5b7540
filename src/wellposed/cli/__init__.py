"""The command line: `wellposed COMMAND ...`, one file per command, no logic in any of them."""

import os
import sys
from collections.abc import Sequence

import tyro
from tyro.extras import SubcommandApp

from wellposed.cli import bench, compress, diagnose, evaluate, finetune, fit, pretrain, sequences, study, train
from wellposed.errors import WellposedError

DESCRIPTION = "Transformers that are well conditioned by construction, and measured."


def _app(argv: Sequence[str]) -> SubcommandApp:
    app = SubcommandApp()
    app.command(name="study")(study.command(argv))
    app.command(train.command(argv))
    app.command(pretrain.command(argv))
    app.command(sequences.app, name="sequences", help="Softmax against other attention on ListOps and text.")
    app.command(evaluate.app, name="evaluate", help="What the features of a model know.")
    app.command(diagnose.diagnose)
    app.command(finetune.app(argv), name="finetune", help="Adapters, or all weights, of models that are already there.")
    app.command(compress.compress)
    app.command(fit.app(argv), name="fit", help="Images, shapes and scenes as networks of a handful of parameters.")
    app.command(bench.app, name="bench", help="The measured comparisons with peers.")
    return app


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its status: 0, 2 for what the user can mend, 130 for Ctrl-C, 141 for a closed pipe."""
    argv = sys.argv[1:] if argv is None else argv
    if list(argv) == ["--version"]:
        import wellposed

        print(f"wellposed {wellposed.__version__}")
        return 0
    try:
        _app(argv).cli(prog="wellposed", description=DESCRIPTION, args=argv, config=(tyro.conf.OmitArgPrefixes,))
    except WellposedError as error:
        print(f"wellposed: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # whoever read the output has left, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + 13
    return 0
