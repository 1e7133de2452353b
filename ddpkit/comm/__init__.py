"""The ranks talk: rendezvous, process group, mailbox over the store, and checks that they mean the same."""
