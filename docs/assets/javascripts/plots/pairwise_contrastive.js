// One pair at distance x, as one of the same class and as one of two classes.
export const x = { label: "Euclidean distance of the pair" }
export const panels = { value: "loss", gradient: "gradient by the distance" }
export const sliders = {
  margin: { label: "margin", min: 0, max: 3, step: 0.05, value: 1 },
}
export const lines = {
  "m = 1": { margin: 1 },
}

export function curves({ margin }) {
  const xs = Array.from({ length: 150 }, (_, i) => (i + 0.5) / 50)
  const lack = xs.map((d) => Math.max(0, margin - d))
  return {
    x: xs,
    value: { same: xs.map((d) => d * d), different: lack.map((h) => h * h) },
    gradient: { same: xs.map((d) => 2 * d), different: lack.map((h) => -2 * h) },
  }
}
