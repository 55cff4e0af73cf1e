"""The models of FineTuneJob and FineTuneProfile, which users write, and of the status that the operator writes."""
