// A token of penalty w costs w (m + beta m^2) at a mean activation of m; under FLOPS m^2. w = exp(-alpha idf),
// where idf is 0 for the most frequent token, 1 for the rarest.
export const x = { label: "mean activation of the token" }
export const panels = { value: "cost of the token", gradient: "pull, times B" }
export const sliders = {
  alpha: { label: "alpha of idf_penalty", min: 0, max: 8, step: 0.1, value: 4 },
  beta: { label: "beta", min: 0, max: 3, step: 0.05, value: 0.3 },
}
export const lines = {
  "": { alpha: 4, beta: 0.3 },
}

const tokens = { "most frequent token": 0, "in the middle": 0.5, rarest: 1 }

export function curves({ alpha, beta }) {
  const xs = Array.from({ length: 201 }, (_, i) => 0.01 + i / 100)
  const value = {}
  const gradient = {}
  for (const [name, idf] of Object.entries(tokens)) {
    const w = Math.exp(-alpha * idf)
    value[name] = xs.map((m) => w * (m + beta * m * m))
    gradient[name] = xs.map((m) => w * (1 + 2 * beta * m))
  }
  value.FLOPS = xs.map((m) => m * m)
  gradient.FLOPS = xs.map((m) => 2 * m)
  return { x: xs, value, gradient }
}
