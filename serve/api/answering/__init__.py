"""What every answering route shares: the body read, the generation followed, events written."""
