"""How results look: text for people, JSON and YAML for programs."""
