// Create elements. Texts become text nodes, so that the browser never parses a text as HTML.

const SVG = "http://www.w3.org/2000/svg";

export function h(tag, properties = {}, ...children) {
  return fill(document.createElement(tag), properties, children);
}

export function s(tag, properties = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), properties, children);
}

function fill(element, properties, children) {
  for (const [name, value] of Object.entries(properties)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "value" || name === "checked") element[name] = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat(Infinity).filter((one) => one !== null && one !== undefined && one !== false));
  return element;
}

export function replace(element, ...children) {
  element.replaceChildren(...children.flat(Infinity).filter((one) => one !== null && one !== undefined && one !== false));
  return element;
}
