"""wellposed bench: the measured comparisons with peers."""

from tyro.extras import SubcommandApp

from wellposed.bench import (
    AdaptersBench,
    AttentionBench,
    CompressBench,
    ConditionBench,
    DiagnoseBench,
    DinoBench,
    DiscoverBench,
    GrayingBench,
    JacobianBench,
    SoapBench,
    TrainBench,
)

app = SubcommandApp()


@app.command
def adapters(config: AdaptersBench) -> None:
    """Time a layer with a sine adapter, forward and backward, against PEFT's LoRA and DoRA.

    Args:
        config: what to measure.
    """
    print(config.run().markdown())


@app.command
def attention(config: AttentionBench) -> None:
    """Time wellposed's attention of degree 3 against the best of torch's flash and cuDNN softmax attention.

    Args:
        config: what to measure.
    """
    print(config.run().markdown())


@app.command
def compress(config: CompressBench) -> None:
    """Memory per adapter and time to switch: adapters packed into some bits against PEFT's in float16.

    Args:
        config: what to measure.
    """
    print(config.run().markdown())


@app.command
def condition(config: ConditionBench) -> None:
    """Time wellposed.condition_ against one full SVD per head and per W_V, W_O pair.

    Args:
        config: what to measure.
    """
    print(config.run().markdown())


@app.command
def diagnose(config: DiagnoseBench) -> None:
    """Time wellposed.diagnose against the forward pass it watches.

    Args:
        config: what to measure.
    """
    print(config.run().markdown())


@app.command
def dino(config: DinoBench) -> None:
    """Time `wellposed pretrain` against a plain loop of timm, torch and torchvision on the same shapes.

    Args:
        config: what to measure.
    """
    print(config.run().markdown())


@app.command
def discover(config: DiscoverBench) -> None:
    """Time wellposed.discover on a batch against one call of scipy's eigh per image.

    Args:
        config: what to measure.
    """
    print(config.run().markdown())


@app.command
def graying(config: GrayingBench) -> None:
    """Time a training step with Token Graying against one without, and wellposed.gray against torch.linalg.svd.

    Args:
        config: what to measure.
    """
    print(config.run().markdown())


@app.command
def jacobian(config: JacobianBench) -> None:
    """Time wellposed.jacobian_spectrum on a block of a ViT against scipy's svds on curvlinops' Jacobian.

    Args:
        config: what to measure.
    """
    print(config.run().markdown())


@app.command
def soap(config: SoapBench) -> None:
    """Time wellposed.SOAP against pytorch_optimizer's SOAP and fused AdamW, alone and within training.

    Args:
        config: what to measure.
    """
    print(config.run().markdown())


@app.command
def train(config: TrainBench) -> None:
    """Time `wellposed train`, with and without skips, against a plain timm + torch loop.

    Args:
        config: what to measure.
    """
    print(config.run().markdown())
