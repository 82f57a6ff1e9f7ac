// A token active at log(1 + z) in a share s of the texts. The language penalty: c s log(1 + z), and a pull of c / (1 + z)
// on each logit; FLOPS of weight f: f (s log(1 + z))^2, and a pull of 2 f s log(1 + z) / (1 + z).
export const x = { label: "pooled logit of the token" }
export const panels = { value: "cost of the token", gradient: "pull on its logit in one text, times B" }
export const sliders = {
  cost: { label: "weight times penalty", min: 0.01, max: 50, value: 0.5, log: true },
  flops: { label: "weight of FLOPS", min: 0.001, max: 50, value: 0.5, log: true },
  texts: { label: "of 100 texts, active in", min: 1, max: 100, step: 1, value: 20, integer: true },
}
export const lines = {
  "": { cost: 0.5, flops: 0.5, texts: 20 },
}

export function curves({ cost, flops, texts }) {
  const xs = Array.from({ length: 201 }, (_, i) => 0.025 + i / 40)
  const share = texts / 100
  const mean = (z) => share * Math.log1p(z)
  return {
    x: xs,
    value: {
      "language penalty": xs.map((z) => cost * mean(z)),
      FLOPS: xs.map((z) => flops * mean(z) ** 2),
    },
    gradient: {
      "language penalty": xs.map((z) => cost / (1 + z)),
      FLOPS: xs.map((z) => (2 * flops * mean(z)) / (1 + z)),
    },
  }
}
