"""Classes of images from frozen features: k-NN and linear probes."""
