"""A thin, exact training toolkit over HuggingFace accelerate."""
