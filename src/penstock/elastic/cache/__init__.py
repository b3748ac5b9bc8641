"""Keep on disk what frozen layers output for each sample, so that later epochs need not compute it."""
