// A small plot of a quantity over the last minutes.

const NAMESPACE = "http://www.w3.org/2000/svg";
const WIDTH = 240;
const HEIGHT = 44;

export const PLOT_SECONDS = 120;

function element(tag, attributes) {
  const made = document.createElementNS(NAMESPACE, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
}

export class Plot {
  // shown: how a value is told.
  constructor(name, shown) {
    this.name = name;
    this.shown = shown;
    this.line = element("polyline", { points: "" });
    this.area = element("polygon", { points: "" });
    this.picture = element("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img" });
    this.picture.append(this.area, this.line);
    this.value = document.createElement("span");
    this.figure = document.createElement("figure");
    const caption = document.createElement("figcaption");
    caption.append(`${name} `, this.value);
    this.figure.append(caption, this.picture);
  }

  // points: [seconds, value] from oldest to newest.
  draw(points) {
    const values = points.map((it) => it[1]);
    const newest = points.at(-1) || [0, 0];
    const most = Math.max(1e-9, ...values);
    const x = (at) => (WIDTH * (1 - (newest[0] - at) / PLOT_SECONDS)).toFixed(1);
    const y = (value) => (HEIGHT - 2 - (HEIGHT - 4) * (value / most)).toFixed(1);
    const line = points.map(([at, value]) => `${x(at)},${y(value)}`).join(" ");
    this.line.setAttribute("points", line);
    this.area.setAttribute(
      "points",
      points.length ? `${x(points[0][0])},${HEIGHT} ${line} ${WIDTH},${HEIGHT}` : "",
    );
    this.value.textContent = this.shown(newest[1]);
    const words = `${this.name} in the last two minutes: ${this.shown(newest[1])} now, at most ${this.shown(most)}`;
    this.picture.setAttribute("aria-label", words);
  }
}
