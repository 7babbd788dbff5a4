"""An exact run around a loop that its owner has written over accelerate, and keeps."""
