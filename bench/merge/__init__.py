"""How long a merge takes and how much memory it needs, against PEFT's own, with every tensor compared bit for bit."""
