"""Copies the results to where they are used. Only this role has credentials to write there; its entry point is
`finetune_trainer.roles.publish.publish`.
"""
