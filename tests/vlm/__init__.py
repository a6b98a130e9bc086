"""mlx-vlm: its models, tiny and with random weights (`models`), its cache classes, and prompts with pictures."""
