"""SmoothMix: training methods for smoothed classifiers."""
