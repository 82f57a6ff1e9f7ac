// One pair: MarginMSE and InfoNCE (temperature 1, on dots) against the student's margin x.
export const x = { label: "the student's margin" }
export const panels = { value: "loss", gradient: "gradient by that margin" }
export const sliders = {
  margin: { label: "the teacher's margin", min: -5, max: 10, step: 0.1, value: 3 },
}
export const lines = {
  "": { margin: 3 },
}

const softplus = (z) => Math.max(z, 0) + Math.log1p(Math.exp(-Math.abs(z)))

export function curves({ margin }) {
  const xs = Array.from({ length: 161 }, (_, i) => -5 + i / 10)
  return {
    x: xs,
    value: { MarginMSE: xs.map((s) => (s - margin) ** 2), InfoNCE: xs.map((s) => softplus(-s)) },
    gradient: { MarginMSE: xs.map((s) => 2 * (s - margin)), InfoNCE: xs.map((s) => -1 / (1 + Math.exp(s))) },
  }
}
