"""Update rules of optimizers and schedules of the learning rate, the same for both frameworks."""
