"""Flags of a small run of recipes/cifar.py, on the digits of scikit-learn."""

ON_DIGITS = ["--dataset", "digits", "--model", "resnet8", "--augment.crop-padding", "1"]
