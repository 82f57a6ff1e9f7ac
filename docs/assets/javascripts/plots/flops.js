// FLOPS on average over batches of B independent texts: a token is active, at 1, in a share p of them.
// Biased: V (p^2 + p (1 - p) / B), and an active entry is pulled by 2 (1 + (B - 1) p) / B; unbiased: the limits.
export const x = { label: "rows of the batch", log: true }
export const panels = { value: "average loss", gradient: "average pull on an active entry, times B" }
export const sliders = {
  share: { label: "share of texts", min: 0.001, max: 0.5, value: 0.02, log: true },
  vocabulary: { label: "vocabulary", min: 1000, max: 250002, value: 30522, log: true, integer: true },
}
export const lines = {
  "in 2% of texts": { share: 0.02, vocabulary: 30522 },
  "in 0.5%": { share: 0.005, vocabulary: 30522 },
}

export function curves({ share: p, vocabulary }) {
  const xs = Array.from({ length: 17 }, (_, i) => Math.round(2 ** (2 + i / 2)))
  return {
    x: xs,
    value: {
      biased: xs.map((b) => vocabulary * (p * p + (p * (1 - p)) / b)),
      unbiased: xs.map(() => vocabulary * p * p),
    },
    gradient: {
      biased: xs.map((b) => (2 * (1 + (b - 1) * p)) / b),
      unbiased: xs.map(() => 2 * p),
    },
  }
}
