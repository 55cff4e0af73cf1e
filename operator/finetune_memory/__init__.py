"""How much memory a training rank needs: from plan and model structure alone, without torch."""
