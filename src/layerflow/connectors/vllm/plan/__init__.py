"""What the scheduler's side tells every worker of a step, and what the workers tell it back."""
