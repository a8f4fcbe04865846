"""Propose raw features and losses from the columns of a file, so that a first model takes one command.

``propose`` reads the columns, ``proposed_label`` and ``proposed_column`` decide, and ``document`` shows and writes.
"""

from training.proposal.document import Proposal, shown, write_proposal
from training.proposal.proposing import propose

__all__ = ["Proposal", "propose", "shown", "write_proposal"]
