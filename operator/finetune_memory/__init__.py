"""How much memory a training rank needs, and how long a step takes: from plan and model structure alone, without torch."""
