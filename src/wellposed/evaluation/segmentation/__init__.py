"""The dense linear probe: classes of pixels from frozen features."""
