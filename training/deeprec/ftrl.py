"""TensorFlow's FTRL optimizer."""

from training.optimizers import Ftrl, Params


class FtrlOptimizer(Ftrl):
    """TensorFlow's ``tf.train.FtrlOptimizer``, for parameters and for the tables of columns.

    TensorFlow puts twice its l2 into the formula of ``training.optimizers.Ftrl``.
    """

    def __init__(
        self,
        params: Params,
        learning_rate: float,
        *,
        initial_accumulator_value: float = 0.1,
        l1_regularization_strength: float = 0.0,
        l2_regularization_strength: float = 0.0,
    ) -> None:
        """Optimize ``params``.

        Args:
            params: tensors, or parameter groups as in ``torch.optim``.
            learning_rate: at least 0.
            initial_accumulator_value: above 0.
            l1_regularization_strength: at least 0.
            l2_regularization_strength: at least 0.

        Raises:
            ValueError: a number is out of range.
        """
        if l2_regularization_strength < 0:
            raise ValueError(f"l2_regularization_strength must be at least 0, got {l2_regularization_strength}")
        super().__init__(
            params,
            learning_rate,
            l1=l1_regularization_strength,
            l2=2 * l2_regularization_strength,
            initial_accumulator=initial_accumulator_value,
        )
