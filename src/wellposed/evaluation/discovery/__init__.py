"""TokenCut: the one object of an image, from its patch features alone."""
