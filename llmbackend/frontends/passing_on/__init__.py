"""In a frontend process: requests that it does not answer itself go on to the host's application, as bytes."""
